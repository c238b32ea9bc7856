// MSL's functions of numbers. Those of half and bfloat are computed in float and rounded once.
#pragma once

#define MSLEMU_VECTORS(T)                                                                                       \
  typedef metal::vec<T, 2> T##2;                                                                                \
  typedef metal::vec<T, 3> T##3;                                                                                \
  typedef metal::vec<T, 4> T##4;
MSLEMU_VECTORS(float) MSLEMU_VECTORS(half) MSLEMU_VECTORS(bfloat)
MSLEMU_VECTORS(char) MSLEMU_VECTORS(uchar) MSLEMU_VECTORS(short)
MSLEMU_VECTORS(ushort) MSLEMU_VECTORS(int) MSLEMU_VECTORS(uint) MSLEMU_VECTORS(long) MSLEMU_VECTORS(ulong)
#if defined(MSLEMU_STRICT)
typedef metal::mslemu_bools<2> bool2;
typedef metal::mslemu_bools<3> bool3;
typedef metal::mslemu_bools<4> bool4;
#else
MSLEMU_VECTORS(bool)
#endif
#undef MSLEMU_VECTORS

namespace metal {

#define MSLEMU_UNARY(name, result)                                        \
  inline float name(float x) { return result; }                           \
  inline half name(half h) { const float x = h; return half(result); }    \
  inline bfloat name(bfloat h) { const float x = h; return bfloat(result); } \
  template <class T, int N> inline vec<T, N> name(vec<T, N> v) {          \
    for (int i = 0; i < N; ++i) v[i] = name(T(v[i]));                     \
    return v;                                                             \
  }
#define MSLEMU_UNARIES                                                                                          \
  MSLEMU_UNARY(exp, __builtin_expf(x)) MSLEMU_UNARY(exp2, __builtin_exp2f(x))                                   \
  MSLEMU_UNARY(exp10, __builtin_powf(10.0f, x)) MSLEMU_UNARY(log, __builtin_logf(x))                            \
  MSLEMU_UNARY(log2, __builtin_log2f(x)) MSLEMU_UNARY(log10, __builtin_log10f(x))                               \
  MSLEMU_UNARY(sqrt, __builtin_sqrtf(x)) MSLEMU_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x))                         \
  MSLEMU_UNARY(sin, __builtin_sinf(x)) MSLEMU_UNARY(cos, __builtin_cosf(x)) MSLEMU_UNARY(tan, __builtin_tanf(x)) \
  MSLEMU_UNARY(sinpi, __builtin_sinf(x * M_PI_F)) MSLEMU_UNARY(cospi, __builtin_cosf(x * M_PI_F))               \
  MSLEMU_UNARY(sinh, __builtin_sinhf(x)) MSLEMU_UNARY(cosh, __builtin_coshf(x))                                 \
  MSLEMU_UNARY(tanh, __builtin_tanhf(x)) MSLEMU_UNARY(asin, __builtin_asinf(x))                                 \
  MSLEMU_UNARY(acos, __builtin_acosf(x)) MSLEMU_UNARY(atan, __builtin_atanf(x))                                 \
  MSLEMU_UNARY(asinh, __builtin_asinhf(x)) MSLEMU_UNARY(acosh, __builtin_acoshf(x))                             \
  MSLEMU_UNARY(atanh, __builtin_atanhf(x)) MSLEMU_UNARY(floor, __builtin_floorf(x))                             \
  MSLEMU_UNARY(ceil, __builtin_ceilf(x)) MSLEMU_UNARY(round, __builtin_roundf(x))                               \
  MSLEMU_UNARY(rint, __builtin_rintf(x)) MSLEMU_UNARY(trunc, __builtin_truncf(x))                               \
  MSLEMU_UNARY(fabs, __builtin_fabsf(x)) MSLEMU_UNARY(fract, x - __builtin_floorf(x))                           \
  MSLEMU_UNARY(sign, (x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f))                                               \
  MSLEMU_UNARY(saturate, (x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f))
MSLEMU_UNARIES
namespace fast {
MSLEMU_UNARIES
}
namespace precise {
MSLEMU_UNARIES
}
#undef MSLEMU_UNARIES
#undef MSLEMU_UNARY

#define MSLEMU_BINARY(name, function)                                                               \
  inline float name(float a, float b) { return function(a, b); }                                    \
  inline half name(half a, half b) { return half(function(float(a), float(b))); }                   \
  inline bfloat name(bfloat a, bfloat b) { return bfloat(function(float(a), float(b))); }           \
  template <class T, int N> inline vec<T, N> name(vec<T, N> a, vec<T, N> b) {                       \
    for (int i = 0; i < N; ++i) a[i] = name(T(a[i]), T(b[i]));                                      \
    return a;                                                                                       \
  }
MSLEMU_BINARY(pow, __builtin_powf) MSLEMU_BINARY(powr, __builtin_powf) MSLEMU_BINARY(fmod, __builtin_fmodf)
MSLEMU_BINARY(atan2, __builtin_atan2f) MSLEMU_BINARY(copysign, __builtin_copysignf)
MSLEMU_BINARY(fmax, __builtin_fmaxf) MSLEMU_BINARY(fmin, __builtin_fminf) MSLEMU_BINARY(fdim, __builtin_fdimf)
#undef MSLEMU_BINARY

inline float divide(float a, float b) { return a / b; }
inline float sincos(float x, float& cosine) {
  cosine = __builtin_cosf(x);
  return __builtin_sinf(x);
}
inline float ldexp(float x, int k) { return __builtin_ldexpf(x, k); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// Products of half and bfloat are exact in float's 24 bits; the sum is rounded there and again, as a mixed unit does.
inline half fma(half a, half b, half c) { return half(__builtin_fmaf(float(a), float(b), float(c))); }
inline bfloat fma(bfloat a, bfloat b, bfloat c) { return bfloat(__builtin_fmaf(float(a), float(b), float(c))); }
template <class T, int N> inline vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
  for (int i = 0; i < N; ++i) a[i] = metal::fma(T(a[i]), T(b[i]), T(c[i]));
  return a;
}

#define MSLEMU_CLASSIFY(name, result)                 \
  inline bool name(float x) { return result; }        \
  inline bool name(half h) { return name(float(h)); } \
  inline bool name(bfloat h) { return name(float(h)); }
MSLEMU_CLASSIFY(isnan, x != x) MSLEMU_CLASSIFY(isinf, __builtin_fabsf(x) == __builtin_inff())
MSLEMU_CLASSIFY(isfinite, __builtin_fabsf(x) < __builtin_inff()) MSLEMU_CLASSIFY(signbit, __builtin_signbitf(x))
#undef MSLEMU_CLASSIFY

// One type for all arguments: in MSL a mixture is an ambiguous call. Of a NaN and a number, the number.
template <class T> inline T max(T a, T b) { return a < b || a != a ? b : a; }
template <class T> inline T min(T a, T b) { return b < a || a != a ? b : a; }
template <class T> inline T clamp(T x, T low, T high) { return metal::min(metal::max(x, low), high); }
template <class T> inline T abs(T x) { return x < T(0) ? T(-x) : x; }
template <class T> inline T mix(T a, T b, T t) { return T(a + T(b - a) * t); }
template <class T> inline T step(T edge, T x) { return x < edge ? T(0) : T(1); }
template <class T> inline T select(T a, T b, bool take_b) { return take_b ? b : a; }
template <class T> inline T fmax3(T a, T b, T c) { return metal::max(a, metal::max(b, c)); }
template <class T> inline T fmin3(T a, T b, T c) { return metal::min(a, metal::min(b, c)); }
template <class T> inline T max3(T a, T b, T c) { return metal::max(a, metal::max(b, c)); }
template <class T> inline T min3(T a, T b, T c) { return metal::min(a, metal::min(b, c)); }
#define MSLEMU_EACH(name)                                                                  \
  template <class T, int N> inline vec<T, N> name(vec<T, N> a, vec<T, N> b) {              \
    for (int i = 0; i < N; ++i) a[i] = metal::name(T(a[i]), T(b[i]));                      \
    return a;                                                                              \
  }                                                                                        \
  template <class T, int N> inline vec<T, N> name(vec<T, N> a, mslemu_same_t<T> b) {       \
    for (int i = 0; i < N; ++i) a[i] = metal::name(T(a[i]), b);                            \
    return a;                                                                              \
  }
MSLEMU_EACH(max) MSLEMU_EACH(min)
#undef MSLEMU_EACH
template <class T, int N> inline vec<T, N> clamp(vec<T, N> x, mslemu_same_t<T> low, mslemu_same_t<T> high) {
  return metal::min(metal::max(x, low), high);
}
template <class T, int N> inline vec<T, N> abs(vec<T, N> x) {
  for (int i = 0; i < N; ++i) x[i] = metal::abs(T(x[i]));
  return x;
}
#if !defined(MSLEMU_STRICT)
template <class T, int N> inline vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> take_b) {
  for (int i = 0; i < N; ++i) a[i] = take_b[i] ? b[i] : a[i];
  return a;
}
template <int N> inline bool any(vec<bool, N> v) {
  for (int i = 0; i < N; ++i) if (v[i]) return true;
  return false;
}
template <int N> inline bool all(vec<bool, N> v) {
  for (int i = 0; i < N; ++i) if (!v[i]) return false;
  return true;
}
#else
template <class V, class M> V select(V a, V b, M take_b);
template <class M> bool any(M v);
template <class M> bool all(M v);
#endif
template <class T, int N> inline T dot(vec<T, N> a, vec<T, N> b) {
  T sum = T(a[0] * b[0]);
  for (int i = 1; i < N; ++i) sum = T(sum + T(a[i] * b[i]));
  return sum;
}
template <class T, int N> inline T length_squared(vec<T, N> v) { return metal::dot(v, v); }
template <class T, int N> inline T length(vec<T, N> v) { return metal::sqrt(metal::dot(v, v)); }

// fast:: and precise:: differ from the plain functions on the hardware, here they don't.
namespace fast {
using metal::atan2, metal::fmod, metal::pow, metal::powr, metal::sincos, metal::divide;
using metal::clamp, metal::fmax, metal::fmin, metal::max, metal::min, metal::mix;
}  // namespace fast
namespace precise {
using metal::atan2, metal::fma, metal::fmod, metal::pow, metal::powr, metal::sincos, metal::divide;
using metal::clamp, metal::fmax, metal::fmin, metal::max, metal::min, metal::mix;
}  // namespace precise

template <class T> inline T popcount(T x) { return T(__builtin_popcountll(mslemu_bits<T>(x))); }
template <class T> inline T clz(T x) {
  const mslemu_bits<T> bits = mslemu_bits<T>(x);
  return T(bits ? __builtin_clzll(bits) - (64 - int(sizeof(T)) * 8) : int(sizeof(T)) * 8);
}
template <class T> inline T ctz(T x) { return T(x ? __builtin_ctzll(mslemu_bits<T>(x)) : int(sizeof(T)) * 8); }
inline uint mulhi(uint a, uint b) { return uint(ulong(a) * b >> 32); }
inline int mulhi(int a, int b) { return int(long(a) * b >> 32); }
template <class T> inline T rotate(T x, T by) {
  const int width = sizeof(T) * 8, k = int(by) & (width - 1);
  const mslemu_bits<T> bits = mslemu_bits<T>(x);
  return k ? T(mslemu_bits<T>(bits << k | bits >> (width - k))) : x;
}
}  // namespace metal
