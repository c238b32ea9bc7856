// A head that holds more than budget rows loses the victim: its slot is emptied, by the thread that has had it so far.
// Bytes of a head: 12 to write; 4·C to read for the count, from cache.
const bool over = h2o::count_held(ranked, held_part, t) > uint(limits[0]);
if (over && gone % t.count == t.index) {
  new_scores[base + gone] = 0.0f;
  new_totals[base + gone] = 0.0f;
  new_positions[base + gone] = -1;
}
