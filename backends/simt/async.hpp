// Copies to shared memory that go on while a thread computes. Each is its own thread's: what it copied is there for that
// thread when it has `arrived`, for others after a barrier of theirs. Elsewhere than on NVIDIA's GPUs a copy is done at once.
#pragma once

#include "simt/simt.hpp"

namespace rlk::simt {

// Copies a piece of 16 bytes.
template <class Piece>
__device__ __forceinline__ void send(Piece* to, const Piece* from) {
  static_assert(sizeof(Piece) == 16);
#if defined(__CUDA_ARCH__)
  const auto at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
#else
  *to = *from;
#endif
}
__device__ __forceinline__ void arrived() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// The same in groups that arrive in turn: a thread ends one, and waits until no more than `Left` are under way.
__device__ __forceinline__ void end_group() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int Left>
__device__ __forceinline__ void arrived_but() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
#endif
}

// A thread's place in shared memory, to which it sends pieces of 8 bytes and where it reads them. An address that is found once:
// from a pointer a compiler finds it again at every copy.
template <class Piece>
class Shelf {
  static_assert(sizeof(Piece) == 8);
#if defined(__CUDA_ARCH__)
 public:
  __device__ __forceinline__ explicit Shelf(Piece* first)
      : at_(static_cast<unsigned>(__cvta_generic_to_shared(first))) {
    asm volatile("" : "+r"(at_));
  }
  __device__ __forceinline__ Shelf& operator+=(int pieces) { return at_ += pieces * 8, *this; }
  __device__ __forceinline__ int operator-(Shelf other) const {
    return static_cast<int>(at_ - other.at_) / 8;
  }
  __device__ __forceinline__ void send(int i, const void* from) const {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(at_ + i * 8), "l"(from) : "memory");
  }
  __device__ __forceinline__ Piece get(int i) const {
    Piece piece;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(piece.word[0]), "=r"(piece.word[1])
                 : "r"(at_ + i * 8)
                 : "memory");
    return piece;
  }

 private:
  unsigned at_;
#else
 public:
  __device__ __forceinline__ explicit Shelf(Piece* first) : at_(first) {}
  __device__ __forceinline__ Shelf& operator+=(int pieces) { return at_ += pieces, *this; }
  __device__ __forceinline__ int operator-(Shelf other) const { return static_cast<int>(at_ - other.at_); }
  __device__ __forceinline__ void send(int i, const void* from) const {
    at_[i] = *static_cast<const Piece*>(from);
  }
  __device__ __forceinline__ Piece get(int i) const { return at_[i]; }

 private:
  Piece* at_;
#endif
};

}  // namespace rlk::simt
