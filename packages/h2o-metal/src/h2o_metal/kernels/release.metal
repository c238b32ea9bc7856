// A head that holds more than budget rows loses the victim: its slot is emptied, by the thread that has had it so far.
const bool over = h2o::count_held(ranked, held_part, t) > uint(limits[0]);
if (over && gone % t.count == t.index) {
  new_scores[base + gone] = 0.0f;
  new_totals[base + gone] = 0.0f;
  new_positions[base + gone] = -1;
}
