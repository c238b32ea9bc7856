// A tile of logits, 64 queries by 64 rows, by 256 threads of 4 by 4 each; products are summed in float32.
namespace h2o {

constexpr constant int SIDE = 64, DEPTH = 32, PITCH = DEPTH + 1;  // a pitch that spreads a column over the banks

// Rows of one head in device memory, `step` elements apart, their elements `unit` apart.
template <typename P>
struct Rows2D {
  P first;
  long step, unit;
  int n;
};

template <typename P>
inline Rows2D<P> rows_of(P first, long step, long unit, int n) {
  Rows2D<P> rows = {first, step, unit, n};
  return rows;
}

// x[i][j] = scale · q[y + 16 i] · k[x + 16 j] of the tile, y = index / 16, x = index % 16; 0 beyond the last row.
// qs and ks hold SIDE · PITCH numbers each. A tile's first barrier also ends the reads of the one before.
template <int D, typename Q, typename K>
inline void logits_of_tile(
    thread float (&x)[4][4], Q q, K k, float scale, threadgroup float* qs, threadgroup float* ks, uint index) {
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) x[i][j] = 0.0f;
  const int y = index / 16, z = index % 16;
  for (int d = 0; d < D; d += DEPTH) {
    for (int e = index; e < SIDE * DEPTH; e += 256) {
      const int row = e / DEPTH, w = e % DEPTH, at = row * PITCH + w;
      qs[at] = row < q.n && d + w < D ? float(q.first[row * q.step + (d + w) * q.unit]) * scale : 0.0f;
      ks[at] = row < k.n && d + w < D ? float(k.first[row * k.step + (d + w) * k.unit]) : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int depth = min(DEPTH, D - d);
    for (int w = 0; w < depth; ++w) {
      float a[4], c[4];
      for (int i = 0; i < 4; ++i) a[i] = qs[(y + 16 * i) * PITCH + w], c[i] = ks[(z + 16 * i) * PITCH + w];
      for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j) x[i][j] = fma(a[i], c[j], x[i][j]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

}  // namespace h2o
