// A state as the kernel's input: scores, totals float32, positions int32 [B, H, C], contiguous; seen [B] int32.
// limits [4] = budget, n_sink, grace, n_long.
const uint head = threadgroup_position_in_grid.y;
const uint n_slots = positions_shape[2], b = head / positions_shape[1];
const size_t base = size_t(head) * n_slots;
auto ranked_scores = scores + base;
auto ranked_totals = totals + base;
auto ranked_positions = positions + base;
