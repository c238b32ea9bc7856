// Who goes from one head: h2o_core.eviction's order of rows, without floats that compare equal.
//
//   key(row) = (score, position) as one integer; +inf for a row that stays, −inf for one that is not finite
//   stays    = position < n_sink, or position > newest − grace, or among the n_long largest (total, position) of the
//              finite rows that may go
//
// Keys are integers, unique in a head, so nothing depends on the order of slots. 0 is no row's key.
namespace h2o {

// The bits of a float, ordered as the float is.
inline uint ordered(float x) {
  const uint bits = as_type<uint>(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// By its bits: fast math may take isfinite for true.
inline bool finite(float x) { return (as_type<uint>(x) & 0x7f800000u) != 0x7f800000u; }

inline ulong key(float value, int position) { return ulong(ordered(value)) << 32 | ulong(uint(position)); }

// The slots of one head. F and I are pointers: scores and totals float32 [C], positions int32 [C], −1 where empty.
template <typename F, typename I>
struct Rows {
  F scores, totals;
  I positions;
  uint n_slots;
  int n_sink;
  int last;  // the newest position that may go
  ulong long_term;  // rows that may go stay nevertheless from this key of their total on

  inline bool held(uint c) const { return positions[c] >= 0; }
  inline bool is_finite(uint c) const { return finite(scores[c]) && finite(totals[c]); }
  inline bool may_go(uint c) const { return positions[c] >= n_sink && positions[c] <= last; }

  // 0 if the row doesn't compete for a long-term place.
  inline ulong total_key(uint c) const {
    return held(c) && may_go(c) && is_finite(c) ? key(totals[c], positions[c]) : 0ul;
  }
  // The lowest goes first; 0 for an empty slot.
  inline ulong rank(uint c) const {
    if (!held(c)) return 0ul;
    const ulong total = total_key(c);
    const bool stays = !may_go(c) || (total != 0ul && total >= long_term);
    return key(stays ? INFINITY : is_finite(c) ? scores[c] : -INFINITY, positions[c]);
  }
};

// The sum of x over the threads before this one, and over all.
struct Sums {
  uint before, all;
};

// part holds one number for each SIMD-group, and no other call's.
inline Sums sums(uint x, threadgroup uint* part, Threads t) {
  Sums s = {simd_prefix_exclusive_sum(x), 0u};
  const uint group = simd_sum(x);
  if (t.lane == 0) part[t.group] = group;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = 0; i < t.groups; ++i) {
    if (i < t.group) s.before += part[i];
    s.all += part[i];
  }
  return s;
}

// What finding a threshold needs of a threadgroup's memory.
struct Bench {
  threadgroup uint* counts;  // [256]
  threadgroup uint* found;   // [3]
};

// The n-th largest total key or rank, digit by digit from the top: 3 barriers and one pass over a thread's own slots
// for each of at most 8 digits, 4 unless totals tie. n is at least 1 and at most the number of keys that are not 0.
// A thread reads the slots index, index + count, ... alone.
template <typename R>
inline ulong nth_largest(R rows, bool by_total, uint n, Bench bench, Threads t) {
  ulong prefix = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    for (uint i = t.index; i < 256; i += t.count) bench.counts[i] = 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint c = t.index; c < rows.n_slots; c += t.count) {
      const ulong k = by_total ? rows.total_key(c) : rows.rank(c);
      if (k != 0ul && (shift == 56 || k >> (shift + 8) == prefix)) {
        threadgroup atomic_uint* count = (threadgroup atomic_uint*)(bench.counts + uint(k >> shift & 255ul));
        atomic_fetch_add_explicit(count, 1u, memory_order_relaxed);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t.group == 0) {
      // Lane 0 has the 8 largest digits.
      uint digit = 255 - 8 * t.lane, mine = 0;
      for (uint i = 0; i < 8; ++i) mine += bench.counts[digit - i];
      uint above = simd_prefix_exclusive_sum(mine);
      if (above < n && n <= above + mine) {
        while (above + bench.counts[digit] < n) above += bench.counts[digit--];
        bench.found[0] = digit;
        bench.found[1] = n - above;
        bench.found[2] = bench.counts[digit];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    prefix = prefix << 8 | ulong(bench.found[0]);
    n = bench.found[1];
    // All keys that begin like this are among the n largest: the smallest of them need not be known.
    if (n == bench.found[2]) return prefix << shift;
  }
  return prefix;
}

// Gives the n_long largest totals their places.
template <typename R>
inline void reserve_long_term(thread R& rows, uint n_long, threadgroup uint* part, Bench bench, Threads t) {
  rows.long_term = ~0ul;
  if (n_long == 0) return;
  uint mine = 0;
  for (uint c = t.index; c < rows.n_slots; c += t.count) mine += rows.total_key(c) != 0ul ? 1 : 0;
  const uint n_open = sums(mine, part, t).all;
  rows.long_term = n_open <= n_long ? 0ul : nth_largest(rows, true, n_long, bench, t);
}

template <typename R>
inline uint count_held(R rows, threadgroup uint* part, Threads t) {
  uint mine = 0;
  for (uint c = t.index; c < rows.n_slots; c += t.count) mine += rows.held(c) ? 1 : 0;
  return sums(mine, part, t).all;
}

}  // namespace h2o
