// victim [B, H, 1] uint32: the slot of lowest rank, 0 in a head that holds nothing.
// Bytes of a head: must read 12·C, which rank.metal has counted, and write 4; reads them once more, from cache.
//
// A thread finds the lowest of its own slots, a SIMD-group that of its threads, in halves, for it reduces no 64-bit
// numbers; then every thread looks through the SIMD-groups'.
threadgroup uint high[32], low[32], slots[32];
ulong best = ~0ul;
uint gone = ~0u;
for (uint c = t.index; c < n_slots; c += t.count) {
  const ulong rank = ranked.rank(c);
  if (rank != 0ul && rank < best) best = rank, gone = c;
}
const uint upper = simd_min(uint(best >> 32));
const uint lower = simd_min(uint(best >> 32) == upper ? uint(best) : ~0u);
gone = simd_min(uint(best >> 32) == upper && uint(best) == lower ? gone : ~0u);
if (t.lane == 0) high[t.group] = upper, low[t.group] = lower, slots[t.group] = gone;
threadgroup_barrier(mem_flags::mem_threadgroup);
best = ~0ul;
gone = 0u;
for (uint i = 0; i < t.groups; ++i) {
  const ulong other = ulong(high[i]) << 32 | ulong(low[i]);
  if (other < best) best = other, gone = slots[i];
}
if (t.index == 0) victim[head] = gone;
