// The parts of a head become one: top[g], weight[g], room[g, d] as attend_one.metal leaves them.
//
//   part_sums [B·H, parts, G, DV], part_stats [B·H, parts, G, 2], float32; the rest as in attend_one.metal.
//
// One threadgroup a head. Bytes of a head: 4·parts·G·(DV + 2) to read, which it does once but for stats.
threadgroup float room[G * (DV > 0 ? DV : 1)];
threadgroup float top[G], weight[G];
const uint head = threadgroup_position_in_grid.y;
const uint n_slots = positions_shape[2], b = head / positions_shape[1], h = head % positions_shape[1];
auto stats = part_stats + size_t(head) * PARTS * G * 2;
auto found = part_sums + size_t(head) * PARTS * G * DV;
auto scratch = logits + size_t(head) * n_slots * G;
if (t.index < G) {
  float all = -INFINITY, sum = 0.0f;
  for (uint i = 0; i < PARTS; ++i) all = max(all, float(stats[(i * G + t.index) * 2]));
  for (uint i = 0; i < PARTS; ++i) {
    const uint at = (i * G + t.index) * 2;
    sum += stats[at + 1] * h2o::share(stats[at], all);
  }
  if (SINKS) sum += metal::exp(float(sinks[long(h * G + t.index) * sinks_strides[0]]) - all);
  top[t.index] = all;
  weight[t.index] = sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint e = t.index; e < G * DV; e += t.count) {
  const uint g = e / (DV > 0 ? DV : 1);
  float sum = 0.0f;
  for (uint i = 0; i < PARTS; ++i) sum += found[i * G * DV + e] * h2o::share(stats[(i * G + g) * 2], top[g]);
  room[e] = sum;
}
