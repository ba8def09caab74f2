#include <dlfcn.h>

#include <dnnl.hpp>

#include "child.hpp"

using namespace rlk::ambient;

namespace {

// As a user of oneDNN would: default attributes.
void direct(const char* name, dnnl::memory::data_type type, void* a, void* b) try {
  dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  using Tag = dnnl::memory::format_tag;
  const dnnl::memory::desc left({kM, kK}, type, Tag::ab), right({kK, kN}, type, Tag::ba),
      result({kM, kN}, dnnl::memory::data_type::f32, Tag::ab);
#if DNNL_VERSION_MAJOR >= 3
  const dnnl::matmul::primitive_desc plan(engine, left, right, result);
#else
  const dnnl::matmul::primitive_desc plan(dnnl::matmul::desc(left, right, result), engine);
#endif
  std::vector<float> out(kM * kN);
  dnnl::matmul(plan).execute(stream, {{DNNL_ARG_SRC, dnnl::memory(left, engine, a)},
                                      {DNNL_ARG_WEIGHTS, dnnl::memory(right, engine, b)},
                                      {DNNL_ARG_DST, dnnl::memory(result, engine, out.data())}});
  stream.wait();
  print("direct", name, out);
} catch (const dnnl::error& e) {
  print("direct", name, std::string_view(e.what()));
}

void through_rlk(const char* name, rlk::DType type, void* a, void* b) {
  std::vector<float> out(kM * kN);
  const rlk::Tensor h(a, {kM, kK}, type), w(b, {kN, kK}, type), y(out.data(), {kM, kN}, rlk::DType::f32);
  const rlk::Status s = rlk::lm_head({.hidden = h, .weight = w, .out = y},
                                     {.backend = "onednn", .precision = rlk::Precision::strict});
  s ? print("rlk", name, out) : print("rlk", name, s.message());
}

}  // namespace

int main() {
  std::vector<float> a = numbers(kM * kK, 1), b = numbers(kN * kK, 2);
  std::vector<uint16_t> a16 = halved(a), b16 = halved(b);
  direct("fp32", dnnl::memory::data_type::f32, a.data(), b.data());
  direct("bf16", dnnl::memory::data_type::bf16, a16.data(), b16.data());
  through_rlk("fp32", rlk::DType::f32, a.data(), b.data());
  through_rlk("bf16", rlk::DType::bf16, a16.data(), b16.data());
  // How many threads a library that asks OpenMP would take.
  if (const auto threads = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_max_threads")))
    std::printf("direct threads %d\n", threads());
}
