// Rows turned back from one position and on to another: h2o_rope.rotation.turn.
//
//   (a, b) → (a cos θ − b sin θ, a sin θ + b cos θ),  θ = (position · scale) · frequency
//
//   x [rows, WIDTH] T, old and new positions [rows] int32, frequencies [R] float32, numbers [3] = scale, factor before,
//   factor after; out [rows, WIDTH] T. BACK turns by −θ of old, FORTH by θ of new. Pairs are (2i, 2i + 1) if
//   TRADITIONAL, else (i, i + R); elements from 2R on are copied.
//
// A factor is rounded to T first, as the model rounds it.
//
// Threadgroup: a row. Thread i < R has pair i, thread R + i copies element 2R + i. Float32 between T and T.
// Bytes: must read and write each row once, as it does; 4 or 8 a row for positions.
const uint i = thread_index_in_threadgroup, row = threadgroup_position_in_grid.x;
const uint R = frequencies_shape[0];
const size_t base = size_t(row) * WIDTH;
if (i >= R) {
  out[base + R + i] = x[base + R + i];
} else {
  const uint first = TRADITIONAL ? 2 * i : i, second = TRADITIONAL ? first + 1 : i + R;
  const float before = float(T(numbers[1])), after = float(T(numbers[2]));
  float a = float(x[base + first]) * before, c = float(x[base + second]) * before;
  for (int forth = BACK ? 0 : 1; forth < (FORTH ? 2 : 1); ++forth) {
    const float angle = float(forth ? new_positions[row] : old_positions[row]) * numbers[0] * frequencies[i];
    const float cosine = metal::precise::cos(angle);
    const float sine = forth ? metal::precise::sin(angle) : -metal::precise::sin(angle);
    const float turned = a * cosine - c * sine;
    c = a * sine + c * cosine;
    a = turned;
  }
  out[base + first] = T(a / after);
  out[base + second] = T(c / after);
}
