// One query of each of a KV head's G query heads against the slots of one part of the head.
//
//   logit[c, g] = Σ_d scale · q[g, d] · k[c, d]      −inf for a slot that is empty
//   top[g] = max_c logit[c, g],  weight[g] = Σ_c e^(logit − top) + e^(sink − top)
//   room[g, d] = Σ_c e^(logit − top) · v[c, d]
//
//   q [B, H·G, 1, D], k [B, H, C, D], v [B, H, C, DV], positions [B, H, C] int32, sinks [H·G]: any strides.
//   numbers [2] = scale, decay. logits [B, H, C, G] float32, written here and read again.
//
// Threadgroup (part, head); the parts of a head share its slots evenly. A SIMD-group takes R slots at a time, its lanes
// a key's elements d, d + 32, ...; lane g then keeps query head g's logit, running maximum and sum. For the values a
// thread has one column of every strips-th slot. All sums are float32.
//
// Bytes of a head: must read C·(D + DV) elements of k and v, each once, as it does. Beside them 4·C·G to write and
// 2 · 4·C·G to read again for the logits (threadgroup memory does not hold them for every budget), and 4·C for positions.
constexpr int R = 4, TILE = 64, PER_LANE = (D + 31) / 32, COLUMNS = DV > 0 ? DV : 1;
threadgroup float room[G * (D > DV ? D : DV)];  // the scaled queries, then the output
threadgroup float tops[32 * G], weights[32 * G];
threadgroup float top[G], weight[G];
threadgroup float shares[TILE * G];

const uint head = threadgroup_position_in_grid.y, n_parts = threadgroups_per_grid.x;
const uint n_slots = k_shape[2], b = head / k_shape[1], h = head % k_shape[1];
const uint each = (n_slots + n_parts - 1) / n_parts;
const uint first = min(n_slots, threadgroup_position_in_grid.x * each), last = min(n_slots, first + each);
auto keys = k + h2o::at(k_strides, b, h, 0);
auto rows = v + h2o::at(v_strides, b, h, 0);
auto places = positions + h2o::at(positions_strides, b, h, 0);
device float* scratch = logits + size_t(head) * n_slots * G;

for (uint e = t.index; e < G * D; e += t.count)
  room[e] = float(q[h2o::at(q_strides, b, h * G + e / D, 0) + long(e % D) * q_strides[3]]) * numbers[0];
threadgroup_barrier(mem_flags::mem_threadgroup);

float my_top = -INFINITY, my_weight = 0.0f;
for (uint c = first + t.group * R; c < last; c += t.groups * R) {
  float key[R][PER_LANE];
  float mine[R];
  for (int r = 0; r < R; ++r) {
    const int place = c + r < last ? places[long(c + r) * positions_strides[2]] : -1;
    const bool shown = place >= 0;
    mine[r] = shown ? 0.0f : -INFINITY;
    for (int w = 0; w < PER_LANE; ++w) {
      const int d = t.lane + 32 * w;
      key[r][w] = shown && d < D ? float(keys[long(c + r) * k_strides[2] + long(d) * k_strides[3]]) : 0.0f;
    }
  }
  for (int g = 0; g < G; ++g) {
    float x[R] = {};
    for (int w = 0; w < PER_LANE; ++w) {
      const int d = t.lane + 32 * w;
      const float query = d < D ? room[g * D + d] : 0.0f;
      for (int r = 0; r < R; ++r) x[r] = fma(query, key[r][w], x[r]);
    }
    for (int r = 0; r < R; ++r) {
      const float logit = simd_sum(x[r]);
      if (t.lane == uint(g)) mine[r] += logit;
    }
  }
  for (int r = 0; r < R; ++r) {
    if (t.lane >= G || c + r >= last) continue;
    scratch[size_t(c + r) * G + t.lane] = mine[r];
    if (mine[r] == -INFINITY) continue;
    const float next = max(my_top, mine[r]);
    my_weight = my_weight * metal::exp(my_top - next) + metal::exp(mine[r] - next);
    my_top = next;
  }
}
if (t.lane < G) {
  tops[t.group * G + t.lane] = my_top;
  weights[t.group * G + t.lane] = my_weight;
}
// Of device memory as well: logits are read by other threads than wrote them.
threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
if (t.index < G) {
  float all = -INFINITY, sum = 0.0f;
  for (uint i = 0; i < t.groups; ++i) all = max(all, tops[i * G + t.index]);
  for (uint i = 0; i < t.groups; ++i) sum += weights[i * G + t.index] * h2o::share(tops[i * G + t.index], all);
  if (SINKS) sum += metal::exp(float(sinks[long(h * G + t.index) * sinks_strides[0]]) - all);
  top[t.index] = all;
  weight[t.index] = sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const uint column = t.index % COLUMNS, strip = t.index / COLUMNS;
const uint strips = DV > 0 ? min(t.count / COLUMNS, 8u) : 0u;
float sum[G] = {};
for (uint c = first; c < last && DV > 0; c += TILE) {
  const uint n = min(uint(TILE), last - c);
  for (uint e = t.index; e < n * G; e += t.count) shares[e] = h2o::share(scratch[size_t(c) * G + e], top[e % G]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint j = strip; j < n && strip < strips; j += strips) {
    const float value = float(rows[long(c + j) * v_strides[2] + long(column) * v_strides[3]]);
    for (int g = 0; g < G; ++g) sum[g] = fma(shares[j * G + g], value, sum[g]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
for (uint s = 0; s < strips; ++s) {
  if (strip == s)
    for (int g = 0; g < G; ++g) room[g * COLUMNS + column] = sum[g] + (s > 0 ? room[g * COLUMNS + column] : 0.0f);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
