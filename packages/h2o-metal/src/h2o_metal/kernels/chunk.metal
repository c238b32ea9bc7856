// Queries of a chunk against all rows: what softmax_rows and column_mass share.
//
//   q [B, H·G, N, D], k [B, H, C, D], mask [B, H, N, C] bool (MASK 2) or unused: any strides.
//   numbers [2] = scale, decay. MASK 0: every row is visible. 1: row c of query i if c ≤ C − N + i. 2: where mask is.
const uint index = thread_index_in_threadgroup;
const int N = q_shape[2], C = k_shape[2], n_heads = k_shape[1];
const int y = index / 16, z = index % 16;
threadgroup float qs[h2o::SIDE * h2o::PITCH], ks[h2o::SIDE * h2o::PITCH];
