// MSL's scalar types, type traits and numeric_limits.
#pragma once

typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;  // on every system: MSL's long has 64 bits
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef uint8_t uchar;
typedef uint16_t ushort;
typedef uint32_t uint;
typedef uint64_t ulong;
typedef _Float16 half;

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_inff()
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX half(65504.0f)
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295u
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f
#define M_PI_F 3.14159265358979323846f
#define M_SQRT2_F 1.41421356237309504880f

namespace metal {
template <class T, T v> struct integral_constant {
  static constexpr T value = v;
  typedef T value_type;
  constexpr operator T() const { return v; }
};
typedef integral_constant<bool, true> true_type;
typedef integral_constant<bool, false> false_type;
template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B> inline constexpr bool is_same_v = is_same<A, B>::value;
template <bool c, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool c, class T = void> using enable_if_t = typename enable_if<c, T>::type;
template <bool c, class A, class B> struct conditional { typedef A type; };
template <class A, class B> struct conditional<false, A, B> { typedef B type; };
template <bool c, class A, class B> using conditional_t = typename conditional<c, A, B>::type;
template <class T, class... Of> inline constexpr bool mslemu_one_of = (is_same_v<T, Of> || ...);
template <class T> struct mslemu_same { typedef T type; };
template <class T> using mslemu_same_t = typename mslemu_same<T>::type;  // not deduced from
}  // namespace metal

#if defined(MSLEMU_STRICT)
typedef __bf16 bfloat;  // a struct could not be read out of an address space
#else
// bfloat with bfloat gives bfloat, with float gives float; from a float only by a cast. Each operation is in float,
// rounded once to the nearest even.
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  template <class U, class = metal::enable_if_t<metal::mslemu_one_of<U, float, half, bool, char, int8_t, uint8_t,
      int16_t, uint16_t, int32_t, uint32_t, int64_t, uint64_t, long long, unsigned long long>>>
  explicit constexpr bfloat(U v) : bits(rounded(float(v))) {}
  static constexpr uint16_t rounded(float f) {
    const uint32_t u = __builtin_bit_cast(uint32_t, f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t(u >> 16 | 0x40);
    return uint16_t((u + 0x7fffu + (u >> 16 & 1)) >> 16);
  }
  constexpr operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
  friend constexpr bfloat operator-(bfloat a) { return bfloat(-float(a)); }
#define MSLEMU_BFLOAT(op)                                                                     \
  friend constexpr bfloat operator op(bfloat a, bfloat b) { return bfloat(float(a) op float(b)); } \
  friend bfloat& operator op##=(bfloat& a, bfloat b) { return a = a op b; }
  MSLEMU_BFLOAT(+) MSLEMU_BFLOAT(-) MSLEMU_BFLOAT(*) MSLEMU_BFLOAT(/)
#undef MSLEMU_BFLOAT
};
#endif
constexpr half operator""h(long double x) { return half(x); }
constexpr half operator""h(unsigned long long x) { return half(float(x)); }
constexpr bfloat operator""bf(long double x) { return bfloat(float(x)); }

namespace metal {
template <class T> struct is_floating_point : integral_constant<bool, mslemu_one_of<T, float, half, bfloat>> {};
template <class T> inline constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <class T> struct is_signed : integral_constant<bool, is_floating_point_v<T> ||
    mslemu_one_of<T, char, int8_t, int16_t, int32_t, int64_t, long long>> {};
template <class T> inline constexpr bool is_signed_v = is_signed<T>::value;
template <class T> struct is_unsigned : integral_constant<bool,
    mslemu_one_of<T, bool, uint8_t, uint16_t, uint32_t, uint64_t, unsigned long long>> {};
template <class T> inline constexpr bool is_unsigned_v = is_unsigned<T>::value;
template <class T> struct is_integral : integral_constant<bool,
    is_unsigned_v<T> || (is_signed_v<T> && !is_floating_point_v<T>)> {};
template <class T> inline constexpr bool is_integral_v = is_integral<T>::value;
template <class T> struct is_arithmetic : integral_constant<bool, is_integral_v<T> || is_floating_point_v<T>> {};
template <class T> inline constexpr bool is_arithmetic_v = is_arithmetic<T>::value;
template <class T> using mslemu_bits = conditional_t<sizeof(T) == 1, uint8_t,
    conditional_t<sizeof(T) == 2, uint16_t, conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;
template <class T> using make_unsigned_t = mslemu_bits<T>;

template <class T> struct numeric_limits {
  static constexpr bool is_signed = is_signed_v<T>;
  static constexpr int digits = sizeof(T) * 8 - is_signed;
  static constexpr T max() { return is_same_v<T, bool> ? T(1) : T(mslemu_bits<T>(~mslemu_bits<T>(0)) >> is_signed); }
  static constexpr T min() { return is_signed ? T(-max() - 1) : T(0); }
  static constexpr T lowest() { return min(); }
};
#define MSLEMU_LIMITS(T, digits_, max_, min_, epsilon_)                       \
  template <> struct numeric_limits<T> {                                      \
    static constexpr bool is_signed = true;                                   \
    static constexpr int digits = digits_;                                    \
    static constexpr T max() { return T(max_); }                              \
    static constexpr T lowest() { return T(-max_); }                          \
    static constexpr T min() { return T(min_); }                              \
    static constexpr T epsilon() { return T(epsilon_); }                      \
    static constexpr T infinity() { return T(__builtin_inff()); }             \
    static constexpr T quiet_NaN() { return T(__builtin_nanf("")); }          \
  };
MSLEMU_LIMITS(float, 24, 3.402823466e+38f, 1.175494351e-38f, 1.192092896e-07f)
MSLEMU_LIMITS(half, 11, 65504.0f, 6.103515625e-05f, 0.0009765625f)
MSLEMU_LIMITS(bfloat, 8, 3.38953139e38f, 1.175494351e-38f, 0.0078125f)
#undef MSLEMU_LIMITS
}  // namespace metal

template <class To, class From> inline To as_type(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "as_type: the sizes differ");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
