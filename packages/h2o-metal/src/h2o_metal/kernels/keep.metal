// The budget rows of highest rank, in slot order, then empty slots; the state of those, and one empty slot more.
//
//   kept [B, H, K] uint32, K = min(budget, C); new_scores, new_totals float32, new_positions int32 [B, H, budget + 1]
//
// A thread has every count-th slot; places come from sums over the threadgroup.
// Bytes of a head: must read 12·C and write 16·budget. Writes that; reads 12·C twice and once for each digit of the
// thresholds (see rank.metal), all but the first time from cache. The rows of K and V are not touched:
// mx.take_along_axis reads and writes just the budget rows that stay, which is all that a kernel could do.
const uint budget = uint(limits[0]), wanted = min(budget, n_slots);
const size_t into = size_t(head) * (budget + 1);
const uint n_held = h2o::count_held(ranked, held_part, t);
const ulong least = n_held <= budget ? 1ul : h2o::nth_largest(ranked, false, budget, bench, t);
threadgroup uint places_part[64];  // two, in turn: a thread may be one call ahead of another
uint done = 0, turn = 0;
for (int empty = 0; empty < 2 && done < wanted; ++empty) {
  for (uint c = t.index; c < (n_slots + t.count - 1) / t.count * t.count; c += t.count) {
    const ulong rank = c < n_slots ? ranked.rank(c) : 0ul;
    const bool takes = c < n_slots && (empty ? rank == 0ul : rank >= least);
    const h2o::Sums places = h2o::sums(takes ? 1u : 0u, places_part + 32 * (turn++ % 2), t);
    const uint to = done + places.before;
    done += places.all;
    if (!takes || to >= wanted) continue;
    kept[size_t(head) * wanted + to] = c;
    new_scores[into + to] = ranked_scores[c];
    new_totals[into + to] = ranked_totals[c];
    new_positions[into + to] = ranked_positions[c];
  }
}
for (uint c = wanted + t.index; c <= budget; c += t.count) {
  new_scores[into + c] = 0.0f;
  new_totals[into + c] = 0.0f;
  new_positions[into + c] = -1;
}
