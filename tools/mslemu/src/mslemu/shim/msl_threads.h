// What threads do together: barriers, SIMD-group functions, atomics.
#pragma once

// The caller's place travels as default arguments, so that a report names the kernel's line, not the shim's.
#define MSLEMU_HERE const char *mslemu_file = __builtin_FILE(), unsigned mslemu_line = __builtin_LINE()
#define MSLEMU_CALL(name) MslemuCall{name, mslemu_file, mslemu_line}
#define MSLEMU_RAW __attribute__((no_sanitize("thread", "undefined")))  // the checker is for the kernel's own accesses

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
inline void threadgroup_barrier(mem_flags flags, MSLEMU_HERE) {
  mslemu_barrier(uint(flags), MSLEMU_CALL("threadgroup_barrier"));
}
inline void simdgroup_barrier(mem_flags flags, MSLEMU_HERE) {
  mslemu_simd_barrier(uint(flags), MSLEMU_CALL("simdgroup_barrier"));
}

template <class T> struct mslemu_lanes {
  T values[32];
  uint mask;
  MSLEMU_RAW mslemu_lanes(const T& mine, MslemuCall call) {
    static_assert(sizeof(T) <= 16, "a lane gives at most 16 bytes");
    mask = mslemu_gather(&mine, values, sizeof(T), call);
  }
  bool on(uint lane) const { return lane < 32 && (mask >> lane & 1); }
  MSLEMU_RAW T of(uint lane, MslemuCall call) const {
    if (!on(lane)) mslemu_inactive_lane(lane, call);
    return values[on(lane) ? lane : mslemu_lane()];
  }
};

// The order in which the hardware reduces is its own affair; 0 is a tree, 1 up the lanes, 2 down.
template <class T, class F> MSLEMU_RAW T mslemu_reduce(const T& mine, F f, MslemuCall call) {
  mslemu_lanes<T> lanes(mine, call);
  T a[32];
  int n = 0;
  const uint order = mslemu_simd_order();
  for (uint i = 0; i < 32; ++i) {
    const uint lane = order == 2 ? 31 - i : i;
    if (lanes.on(lane)) a[n++] = lanes.values[lane];
  }
  if (order != 0) {
    for (int i = 1; i < n; ++i) a[0] = f(a[0], a[i]);
    return a[0];
  }
  for (int step = 1; step < n; step *= 2)
    for (int i = 0; i + step < n; i += 2 * step) a[i] = f(a[i], a[i + step]);
  return a[0];
}
#define MSLEMU_REDUCTION(name, result)                                                            \
  template <class T> inline T name(T x, MSLEMU_HERE) {                                            \
    return mslemu_reduce(x, [](T a, T b) -> T { return T(result); }, MSLEMU_CALL(#name));         \
  }
MSLEMU_REDUCTION(simd_sum, a + b) MSLEMU_REDUCTION(simd_product, a * b)
MSLEMU_REDUCTION(simd_max, metal::max(a, b)) MSLEMU_REDUCTION(simd_min, metal::min(a, b))
MSLEMU_REDUCTION(simd_and, a & b) MSLEMU_REDUCTION(simd_or, a | b) MSLEMU_REDUCTION(simd_xor, a ^ b)
#undef MSLEMU_REDUCTION

// `from` is the lane read; where `wraps` says that there is none, a lane keeps its own value.
#define MSLEMU_SHUFFLE(name, argument, from, wraps)                                                \
  template <class T> inline T name(T x, ushort argument, MSLEMU_HERE) {                            \
    const mslemu_lanes<T> lanes(x, MSLEMU_CALL(#name));                                            \
    const uint me = mslemu_lane();                                                                 \
    return (wraps) ? x : lanes.of(from, MSLEMU_CALL(#name));                                       \
  }
MSLEMU_SHUFFLE(simd_shuffle, lane, lane, (void(me), false))
MSLEMU_SHUFFLE(simd_broadcast, lane, lane, (void(me), false))
MSLEMU_SHUFFLE(simd_shuffle_xor, mask, me ^ mask, false)
MSLEMU_SHUFFLE(simd_shuffle_down, delta, me + delta, me + delta > 31)
MSLEMU_SHUFFLE(simd_shuffle_up, delta, me - delta, delta > me)
MSLEMU_SHUFFLE(simd_shuffle_rotate_down, delta, (me + delta) & 31, false)
MSLEMU_SHUFFLE(simd_shuffle_rotate_up, delta, (me - delta) & 31, false)
#undef MSLEMU_SHUFFLE
template <class T> inline T simd_shuffle_and_fill_up(T x, T filling, ushort delta, MSLEMU_HERE) {
  const MslemuCall call = MSLEMU_CALL("simd_shuffle_and_fill_up");
  const mslemu_lanes<T> lanes(x, call), fill(filling, call);
  const uint me = mslemu_lane();
  return delta > me ? fill.of((32 + me - delta) & 31, call) : lanes.of(me - delta, call);
}
template <class T> inline T simd_shuffle_and_fill_down(T x, T filling, ushort delta, MSLEMU_HERE) {
  const MslemuCall call = MSLEMU_CALL("simd_shuffle_and_fill_down");
  const mslemu_lanes<T> lanes(x, call), fill(filling, call);
  const uint from = mslemu_lane() + delta;
  return from > 31 ? fill.of(from & 31, call) : lanes.of(from, call);
}
template <class T> inline T simd_broadcast_first(T x, MSLEMU_HERE) {
  const mslemu_lanes<T> lanes(x, MSLEMU_CALL("simd_broadcast_first"));
  return lanes.values[__builtin_ctz(lanes.mask)];
}
inline bool simd_is_first(MSLEMU_HERE) {
  const mslemu_lanes<bool> lanes(true, MSLEMU_CALL("simd_is_first"));
  return mslemu_lane() == uint(__builtin_ctz(lanes.mask));
}
#define MSLEMU_PREFIX(name, start, op, last)                                                   \
  template <class T> MSLEMU_RAW inline T name(T x, MSLEMU_HERE) {                              \
    const mslemu_lanes<T> lanes(x, MSLEMU_CALL(#name));                                        \
    T result = T(start);                                                                       \
    for (uint i = 0; i < mslemu_lane() + last; ++i)                                            \
      if (lanes.on(i)) result = T(result op lanes.values[i]);                                  \
    return result;                                                                             \
  }
MSLEMU_PREFIX(simd_prefix_inclusive_sum, 0, +, 1) MSLEMU_PREFIX(simd_prefix_exclusive_sum, 0, +, 0)
MSLEMU_PREFIX(simd_prefix_inclusive_product, 1, *, 1) MSLEMU_PREFIX(simd_prefix_exclusive_product, 1, *, 0)
#undef MSLEMU_PREFIX

struct simd_vote {
  typedef ulong vote_t;
  vote_t votes;
  explicit operator vote_t() const { return votes; }
  bool all() const { return votes == 0xffffffffu; }
  bool any() const { return votes != 0; }
};
MSLEMU_RAW inline uint mslemu_votes(const mslemu_lanes<bool>& lanes) {
  uint votes = 0;
  for (uint i = 0; i < 32; ++i) votes |= uint(lanes.on(i) && lanes.values[i]) << i;
  return votes;
}
inline simd_vote simd_ballot(bool vote, MSLEMU_HERE) {
  return {mslemu_votes(mslemu_lanes<bool>(vote, MSLEMU_CALL("simd_ballot")))};
}
inline simd_vote simd_active_threads_mask(MSLEMU_HERE) {
  return {mslemu_lanes<bool>(true, MSLEMU_CALL("simd_active_threads_mask")).mask};
}
inline bool simd_all(bool vote, MSLEMU_HERE) {
  const mslemu_lanes<bool> lanes(vote, MSLEMU_CALL("simd_all"));
  return mslemu_votes(lanes) == lanes.mask;
}
inline bool simd_any(bool vote, MSLEMU_HERE) {
  return mslemu_votes(mslemu_lanes<bool>(vote, MSLEMU_CALL("simd_any"))) != 0;
}

enum memory_order { memory_order_relaxed = 0 };
template <class T> struct atomic { T value; };
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<ulong> atomic_ulong;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;

#if defined(MSLEMU_STRICT)  // an atomic is in device or in threadgroup memory
#define MSLEMU_MODIFY(space, name) \
  template <class T> T atomic_##name##_explicit(volatile space atomic<T>* p, mslemu_same_t<T> x, memory_order);
#define MSLEMU_ATOMICS(space)                                                                                   \
  template <class T> T atomic_load_explicit(const volatile space atomic<T>* p, memory_order);                   \
  template <class T> void atomic_store_explicit(volatile space atomic<T>* p, mslemu_same_t<T> x, memory_order); \
  template <class T>                                                                                            \
  bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>* p, mslemu_same_t<T>* expected,           \
                                             mslemu_same_t<T> x, memory_order, memory_order);                   \
  MSLEMU_MODIFY(space, exchange) MSLEMU_MODIFY(space, fetch_add) MSLEMU_MODIFY(space, fetch_sub)                \
  MSLEMU_MODIFY(space, fetch_max) MSLEMU_MODIFY(space, fetch_min) MSLEMU_MODIFY(space, fetch_or)                \
  MSLEMU_MODIFY(space, fetch_and) MSLEMU_MODIFY(space, fetch_xor)
MSLEMU_ATOMICS(device)
MSLEMU_ATOMICS(threadgroup)
#else
template <class T> MSLEMU_RAW T atomic_load_explicit(const volatile atomic<T>* p, memory_order, MSLEMU_HERE) {
  mslemu_atomic(p, sizeof(T), MSLEMU_READ, MSLEMU_CALL("atomic_load"));
  return p->value;
}
template <class T>
MSLEMU_RAW void atomic_store_explicit(volatile atomic<T>* p, mslemu_same_t<T> x, memory_order, MSLEMU_HERE) {
  mslemu_atomic(p, sizeof(T), MSLEMU_WRITE, MSLEMU_CALL("atomic_store"));
  p->value = x;
}
#define MSLEMU_MODIFY(name, result)                                                                             \
  template <class T>                                                                                            \
  MSLEMU_RAW T atomic_##name##_explicit(volatile atomic<T>* p, mslemu_same_t<T> x, memory_order, MSLEMU_HERE) { \
    mslemu_atomic(p, sizeof(T), MSLEMU_BOTH, MSLEMU_CALL("atomic_" #name));                                     \
    const T old = p->value;                                                                                     \
    p->value = T(result);                                                                                       \
    return old;                                                                                                 \
  }
MSLEMU_MODIFY(exchange, x) MSLEMU_MODIFY(fetch_add, old + x) MSLEMU_MODIFY(fetch_sub, old - x)
MSLEMU_MODIFY(fetch_max, metal::max(old, x)) MSLEMU_MODIFY(fetch_min, metal::min(old, x))
MSLEMU_MODIFY(fetch_or, old | x) MSLEMU_MODIFY(fetch_and, old & x) MSLEMU_MODIFY(fetch_xor, old ^ x)
template <class T>
MSLEMU_RAW bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* p, mslemu_same_t<T>* expected,
                                                      mslemu_same_t<T> x, memory_order, memory_order, MSLEMU_HERE) {
  mslemu_atomic(p, sizeof(T), MSLEMU_BOTH, MSLEMU_CALL("atomic_compare_exchange_weak"));
  const T old = p->value;
  const bool same = __builtin_memcmp(&old, expected, sizeof(T)) == 0;
  if (same) p->value = x;
  *expected = old;
  return same;
}
#endif
#undef MSLEMU_MODIFY
}  // namespace metal
