// The mass of one query into the state, as h2o_core.observe.
//
//   new score = score · decay + mean over g of p[g, c],  new total = total + the same;  0 where the slot is empty
//
//   scores, totals [B, H, C] float32 in, any strides; new_scores, new_totals, new_positions out, all float32 sums.
//
// A thread has every count-th slot, here and when the victim is looked for, so that no barrier lies between.
// Bytes of a head: must read and write 12·C, as it does; 4·C·G more to read for the logits.
const size_t base = size_t(head) * n_slots;
for (uint c = t.index; c < n_slots; c += t.count) {
  const float mass = h2o::received<G>(scratch + size_t(c) * G, top, weight);
  const int place = positions[h2o::at(positions_strides, b, h, c)];
  const float score = scores[h2o::at(scores_strides, b, h, c)], total = totals[h2o::at(totals_strides, b, h, c)];
  new_scores[base + c] = place >= 0 ? score * numbers[1] + mass : 0.0f;
  new_totals[base + c] = place >= 0 ? total + mass : 0.0f;
  new_positions[base + c] = place;
}
const device float* ranked_scores = new_scores + base;
const device float* ranked_totals = new_totals + base;
const device int* ranked_positions = new_positions + base;
