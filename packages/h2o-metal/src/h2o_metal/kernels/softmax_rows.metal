// The two numbers of each query's softmax, so that p = e^(logit − top) / weight: its log-sum-exp in two parts, since
// their sum in float32 loses as many bits of p as top has before the point.
//
//   rows [B, H·G, N, 2] float32: top = max_c logit, weight = Σ_c e^(logit − top) + e^(sink − top); sinks [H·G]
//
// Threadgroup (64 queries, query head) walks over tiles of 64 rows, to the diagonal and no further. A thread has 4
// queries' every 16th row, with a running maximum and sum; 16 lanes hold a query's and meet by shuffles.
// Bytes: must read q and k and write 8·B·H·G·N. Reads q C/64 times and k G·N/64 times, half of that when causal,
// from cache but for the first.
const int i0 = int(threadgroup_position_in_grid.x) * h2o::SIDE;
const uint b = threadgroup_position_in_grid.y / (n_heads * G), hq = threadgroup_position_in_grid.y % (n_heads * G);
const uint h = hq / G;
auto queries =
    h2o::rows_of(q + h2o::at(q_strides, b, hq, i0), q_strides[2], q_strides[3], min(h2o::SIDE, N - i0));
float top[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, weight[4] = {};
const int end = MASK == 1 ? min(C, C - N + i0 + h2o::SIDE) : C;
for (int c0 = 0; c0 < end; c0 += h2o::SIDE) {
  auto keys = h2o::rows_of(k + h2o::at(k_strides, b, h, c0), k_strides[2], k_strides[3], min(h2o::SIDE, C - c0));
  float x[4][4];
  h2o::logits_of_tile<D>(x, queries, keys, numbers[0], qs, ks, index);
  for (int n = 0; n < 4; ++n) {
    const int i = i0 + y + 16 * n;
    for (int j = 0; j < 4; ++j) {
      const int c = c0 + z + 16 * j;
      if (i >= N || c >= C || (MASK == 1 && c > C - N + i)) continue;
      if (MASK == 2 && !mask[h2o::at(mask_strides, b, h, i) + long(c) * mask_strides[3]]) continue;
      // A logit of −inf that is visible gives 0, not NaN; a NaN stays one.
      if (x[n][j] == -INFINITY) continue;
      const float next = max(top[n], x[n][j]);
      weight[n] = weight[n] * metal::exp(top[n] - next) + metal::exp(x[n][j] - next);
      top[n] = next;
    }
  }
}
for (int n = 0; n < 4; ++n) {
  for (ushort step = 8; step > 0; step /= 2) {
    const float other = simd_shuffle_xor(top[n], step), more = simd_shuffle_xor(weight[n], step);
    const float next = max(top[n], other);
    weight[n] = weight[n] * h2o::share(top[n], next) + more * h2o::share(other, next);
    top[n] = next;
  }
  const int i = i0 + y + 16 * n;
  if (z != 0 || i >= N) continue;
  const size_t at = ((size_t(b) * n_heads * G + hq) * N + i) * 2;
  rows[at] = top[n];
  rows[at + 1] =
      weight[n] + (SINKS ? metal::exp(float(sinks[long(hq) * sinks_strides[0]]) - top[n]) : 0.0f);
}
