// What one part of a head found: sums [B·H, parts, G, DV], stats [B·H, parts, G, 2] = top, weight; float32.
// Bytes of a head: 4·parts·G·(DV + 2) to write, which it does once; the merge reads them.
const size_t mine = size_t(head) * n_parts + threadgroup_position_in_grid.x;
for (uint e = t.index; e < G * DV; e += t.count) part_sums[mine * G * DV + e] = room[e];
if (t.index < G) {
  part_stats[(mine * G + t.index) * 2] = top[t.index];
  part_stats[(mine * G + t.index) * 2 + 1] = weight[t.index];
}
