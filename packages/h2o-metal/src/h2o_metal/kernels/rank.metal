// The order of one head's rows: ranking.metal. limits [4] = budget, n_sink, grace, n_long; seen [B].
// Bytes of a head: must read 12·C. Reads that 1 time, and with n_long above 0 twice more and once for each digit of
// the threshold, 4 unless totals tie; all but the first time from cache.
threadgroup uint counts[256];
threadgroup uint digits[3];
threadgroup uint open_part[32], held_part[32];
const h2o::Bench bench = {counts, digits};
h2o::Rows<decltype(ranked_scores), decltype(ranked_positions)> ranked = {
    ranked_scores, ranked_totals, ranked_positions, n_slots,
    limits[1], seen[long(b) * seen_strides[0]] - 1 - limits[2], ~0ul};
h2o::reserve_long_term(ranked, uint(limits[3]), open_part, bench, t);
