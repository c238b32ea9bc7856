// mass [B, H, C] float32. A thread has every count-th slot.
// Bytes of a head: must write 4·C, as it does; 4·C·G more to read for the logits.
for (uint c = t.index; c < n_slots; c += t.count)
  mass[size_t(head) * n_slots + c] = h2o::received<G>(scratch + size_t(c) * G, top, weight);
