// MSL's vectors for type checking: clang's own, since no struct of C++ can be assigned to through an address space.
// Their constructors with several arguments have no C++ form; strict.py writes them as mslemu_make.
#pragma once

namespace metal {
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
template <class V, class... A> V mslemu_make(A... parts);
template <int N> struct mslemu_bools {  // clang compares vectors to vectors of integers
  bool x, y, z, w;
  mslemu_bools() = default;
  template <class V> mslemu_bools(V comparison);
  bool& operator[](int i);
};
}  // namespace metal
