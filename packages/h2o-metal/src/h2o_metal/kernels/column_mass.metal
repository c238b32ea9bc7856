// The mass that each row received from a chunk, from queries, keys and the numbers of each query's softmax alone:
//
//   total[c] = Σ_i mean over g of p[g, i, c],  decayed[c] = Σ_i decay^(n − 1 − i) · the same,  i < n = lengths[b]
//
//   rows [B, H·G, N, 2] float32 from softmax_rows, lengths [B] int32; decayed, total [B, H, C] float32
//
// Threadgroup (64 rows, KV head) walks over tiles of 64 queries of each query head, from the diagonal on. A thread has
// 4 rows' every 16th query; 16 threads hold a row's and meet in threadgroup memory. No probability leaves a register.
// Bytes: must read q, k and rows and write 8·B·H·C. Reads k once for each of G·N/64 tiles and q and rows C/64 times,
// half of that when causal, from cache but for the first.
const int c0 = int(threadgroup_position_in_grid.x) * h2o::SIDE;
const uint b = threadgroup_position_in_grid.y / n_heads, h = threadgroup_position_in_grid.y % n_heads;
const int n_real = lengths[long(b) * lengths_strides[0]];
auto keys = h2o::rows_of(k + h2o::at(k_strides, b, h, c0), k_strides[2], k_strides[3], min(h2o::SIDE, C - c0));
float sums[2][4] = {};
// No query before this one sees a row of the tile.
const int begin = MASK == 1 ? max(0, c0 - (C - N)) / h2o::SIDE * h2o::SIDE : 0;
for (int g = 0; g < G; ++g) {
  for (int i0 = begin; i0 < n_real; i0 += h2o::SIDE) {
    auto queries = h2o::rows_of(
        q + h2o::at(q_strides, b, h * G + g, i0), q_strides[2], q_strides[3], min(h2o::SIDE, N - i0));
    float x[4][4];
    h2o::logits_of_tile<D>(x, queries, keys, numbers[0], qs, ks, index);
    for (int m = 0; m < 4; ++m) {
      const int i = i0 + y + 16 * m;
      if (i >= n_real) continue;
      const size_t at = ((size_t(b) * n_heads * G + h * G + g) * N + i) * 2;
      const float top = rows[at], weight = rows[at + 1];
      const float fade = metal::pow(numbers[1], float(n_real - 1 - i));
      for (int j = 0; j < 4; ++j) {
        const int c = c0 + z + 16 * j;
        if (c >= C || (MASK == 1 && c > C - N + i)) continue;
        if (MASK == 2 && !mask[h2o::at(mask_strides, b, h, i) + long(c) * mask_strides[3]]) continue;
        const float p = h2o::share(x[m][j], top) / weight;
        sums[0][j] += p * fade;
        sums[1][j] += p;
      }
    }
  }
}
// qs is free again: the tile's last barrier is behind all threads.
for (int which = 0; which < 2; ++which) {
  for (int j = 0; j < 4; ++j) qs[y * h2o::SIDE + z + 16 * j] = sums[which][j];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (index < uint(h2o::SIDE) && c0 + int(index) < C) {
    float sum = 0.0f;
    for (int part = 0; part < 16; ++part) sum += qs[part * h2o::SIDE + index];
    (which ? total : decayed)[(size_t(b) * n_heads + h) * C + c0 + index] = sum / float(G);
  }
  // qs is written again
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
