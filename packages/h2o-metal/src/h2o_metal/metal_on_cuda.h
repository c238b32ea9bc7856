// Metal's words on CUDA. Put before a kernel's header, it makes header and body CUDA C++, both unchanged.
//
// A threadgroup is a block of one dimension and a SIMD-group a warp, 32 threads wide either way. Shapes and strides,
// pointers on Metal, are mlx's arrays here; a kernel's text may index them and pass them on to a template.
static_assert(sizeof(long) == 8, "Metal's long has 64 bits, and so it has on Linux");

// Address spaces: a pointer needs none. `threadgroup` declares memory in a body, which begins with body_on_cuda.h.
#define device
#define constant
#define thread
#define threadgroup
// NVRTC takes a function that says nothing for one of the host. __device__ is a macro whose text has the word device,
// which now means nothing: the attribute's other spelling, which is no macro any more, has not.
#undef __device__
#define inline __attribute__((__device__)) inline

#define thread_index_in_threadgroup threadIdx.x
#define thread_index_in_simdgroup (threadIdx.x % 32u)
#define simdgroup_index_in_threadgroup (threadIdx.x / 32u)
#define simdgroups_per_threadgroup ((blockDim.x + 31u) / 32u)
#define threads_per_threadgroup blockDim
#define threadgroup_position_in_grid blockIdx
#define threadgroups_per_grid gridDim

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

// min, max and fma are CUDA's own, which take the number where the other is NaN, as Metal's do.
namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

// Orders a block's accesses to every memory, whichever was asked for.
inline void threadgroup_barrier(mem_flags) { __syncthreads(); }

typedef uint atomic_uint;
enum memory_order { memory_order_relaxed };
inline uint atomic_fetch_add_explicit(atomic_uint* at, uint x, memory_order) { return atomicAdd(at, x); }

template <typename To, typename From>
inline To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the bits");
  To y;
  memcpy(&y, &x, sizeof(To));
  return y;
}

inline float exp(float x) { return ::expf(x); }
inline float pow(float x, float y) { return ::powf(x, y); }
namespace precise {
inline float cos(float x) { return ::cosf(x); }
inline float sin(float x) { return ::sinf(x); }
}  // namespace precise

// All lanes take part, as Metal wants it: every kernel that calls these has whole SIMD-groups.
constexpr uint ALL = 0xffffffffu;

template <typename T>
inline T simd_shuffle_xor(T x, ushort lanes) { return __shfl_xor_sync(ALL, x, lanes); }

template <typename T>
inline T simd_sum(T x) {
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(ALL, x, lanes);
  return x;
}

template <typename T>
inline T simd_min(T x) {
  for (int lanes = 16; lanes > 0; lanes /= 2) x = ::min(x, __shfl_xor_sync(ALL, x, lanes));
  return x;
}

template <typename T>
inline T simd_prefix_exclusive_sum(T x) {
  T sum = x;
  for (uint lanes = 1; lanes < 32; lanes *= 2) {
    const T before = __shfl_up_sync(ALL, sum, lanes);
    if (thread_index_in_simdgroup >= lanes) sum += before;
  }
  return sum - x;
}

}  // namespace metal
using namespace metal;
