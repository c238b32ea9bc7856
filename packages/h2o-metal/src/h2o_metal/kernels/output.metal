// out [B, H·G, 1, DV] T = room / weight. Bytes of a head: G·DV elements to write, as it does.
for (uint e = t.index; e < G * DV; e += t.count)
  out[size_t(head) * G * DV + e] = T(room[e] / weight[e / (DV > 0 ? DV : 1)]);
