// MSL's vectors for running: a struct each, whose parts (v.xy) are views of its storage.
#pragma once

namespace metal {
template <class T, int N> struct vec;

template <class T, int... I> struct mslemu_part {  // shares a union with the vector's elements
  typedef vec<T, sizeof...(I)> whole;
  T* at() { return reinterpret_cast<T*>(this); }
  const T* at() const { return reinterpret_cast<const T*>(this); }
  operator whole() const { return whole(at()[I]...); }
  mslemu_part& operator=(const whole& v) {
    int k = 0;
    ((at()[I] = v[k++]), ...);
    return *this;
  }
  mslemu_part& operator=(const mslemu_part& other) { return *this = whole(other); }
};

#define MSLEMU_COMMON(N)                                                       \
  vec() = default;                                                             \
  T& operator[](int i) { return e[i]; }                                        \
  const T& operator[](int i) const { return e[i]; }                            \
  vec(const vec& o) { for (int i = 0; i < N; ++i) e[i] = o.e[i]; }             \
  vec& operator=(const vec& o) { for (int i = 0; i < N; ++i) e[i] = o.e[i]; return *this; } \
  vec(T s) { for (int i = 0; i < N; ++i) e[i] = s; }                           \
  template <class U> explicit vec(const vec<U, N>& o) { for (int i = 0; i < N; ++i) e[i] = T(o.e[i]); }

template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
  union {
    T e[2];
    struct { T x, y; };
    struct { T r, g; };
    mslemu_part<T, 0, 1> xy;
    mslemu_part<T, 1, 0> yx;
  };
  MSLEMU_COMMON(2)
  vec(T a, T b) : e{a, b} {}
};

// As large as four elements, as in MSL.
template <class T> struct alignas(4 * sizeof(T)) vec<T, 3> {
  union {
    T e[3];
    struct { T x, y, z; };
    struct { T r, g, b; };
    mslemu_part<T, 0, 1> xy;
    mslemu_part<T, 1, 2> yz;
    mslemu_part<T, 0, 2> xz;
  };
  MSLEMU_COMMON(3)
  vec(T a, T b, T c) : e{a, b, c} {}
  vec(const vec<T, 2>& v, T c) : e{v.x, v.y, c} {}
  vec(T a, const vec<T, 2>& v) : e{a, v.x, v.y} {}
};

template <class T> struct alignas(4 * sizeof(T)) vec<T, 4> {
  union {
    T e[4];
    struct { T x, y, z, w; };
    struct { T r, g, b, a; };
    mslemu_part<T, 0, 1> xy;
    mslemu_part<T, 2, 3> zw;
    mslemu_part<T, 0, 2> xz;
    mslemu_part<T, 1, 3> yw;
    mslemu_part<T, 0, 1, 2> xyz;
    mslemu_part<T, 1, 2, 3> yzw;
    mslemu_part<T, 3, 2, 1, 0> wzyx;
  };
  MSLEMU_COMMON(4)
  vec(T p, T q, T s, T t) : e{p, q, s, t} {}
  vec(const vec<T, 2>& v, T s, T t) : e{v.x, v.y, s, t} {}
  vec(T p, T q, const vec<T, 2>& v) : e{p, q, v.x, v.y} {}
  vec(T p, const vec<T, 2>& v, T t) : e{p, v.x, v.y, t} {}
  vec(const vec<T, 2>& u, const vec<T, 2>& v) : e{u.x, u.y, v.x, v.y} {}
  vec(const vec<T, 3>& v, T t) : e{v.x, v.y, v.z, t} {}
  vec(T p, const vec<T, 3>& v) : e{p, v.x, v.y, v.z} {}
};
#undef MSLEMU_COMMON

// An operator's result: the type of the operand that is a vector or a part of one.
template <class X> struct mslemu_vector { static constexpr bool is = false; };
template <class T, int N> struct mslemu_vector<vec<T, N>> {
  static constexpr bool is = true;
  static constexpr int size = N;
  typedef T item;
  typedef vec<T, N> type;
};
template <class T, int... I> struct mslemu_vector<mslemu_part<T, I...>> : mslemu_vector<vec<T, sizeof...(I)>> {};
template <class A, class B, class = enable_if_t<mslemu_vector<A>::is || mslemu_vector<B>::is>>
using mslemu_result = conditional_t<mslemu_vector<A>::is, mslemu_vector<A>, mslemu_vector<B>>;

#define MSLEMU_ARITHMETIC(op)                                                                       \
  template <class A, class B, class R = mslemu_result<A, B>>                                        \
  inline typename R::type operator op(const A& a, const B& b) {                                     \
    typename R::type x = a, y = b;                                                                  \
    for (int i = 0; i < R::size; ++i) x[i] = typename R::item(x[i] op y[i]);                  \
    return x;                                                                                       \
  }                                                                                                 \
  template <class T, int N, class B> inline vec<T, N>& operator op##=(vec<T, N>& a, const B& b) {   \
    return a = a op b;                                                                              \
  }
MSLEMU_ARITHMETIC(+) MSLEMU_ARITHMETIC(-) MSLEMU_ARITHMETIC(*) MSLEMU_ARITHMETIC(/) MSLEMU_ARITHMETIC(%)
MSLEMU_ARITHMETIC(&) MSLEMU_ARITHMETIC(|) MSLEMU_ARITHMETIC(^) MSLEMU_ARITHMETIC(<<) MSLEMU_ARITHMETIC(>>)
#undef MSLEMU_ARITHMETIC
#define MSLEMU_COMPARISON(op)                                      \
  template <class A, class B, class R = mslemu_result<A, B>>       \
  inline vec<bool, R::size> operator op(const A& a, const B& b) {  \
    const typename R::type x = a, y = b;                           \
    vec<bool, R::size> result;                                     \
    for (int i = 0; i < R::size; ++i) result[i] = x[i] op y[i];    \
    return result;                                                 \
  }
MSLEMU_COMPARISON(==) MSLEMU_COMPARISON(!=)
MSLEMU_COMPARISON(<) MSLEMU_COMPARISON(>) MSLEMU_COMPARISON(<=) MSLEMU_COMPARISON(>=)
#undef MSLEMU_COMPARISON
template <class A, class R = mslemu_vector<A>> inline typename R::type operator-(const A& a) {
  typename R::type x = a;
  for (int i = 0; i < R::size; ++i) x[i] = -x[i];
  return x;
}
}  // namespace metal
