// Launches a sum over ranks: librlk_peers.so, which Python loads where symmetric memory serves a group.
#include "simt/on_device.hpp"
#include "src/python/peers/kernels.hpp"

extern "C" {

__attribute__((visibility("default"))) std::int64_t rlk_peers_bytes(int ranks, int blocks) {
  return rlk::peers::Layout{blocks, ranks}.bytes();
}

__attribute__((visibility("default"))) const char* rlk_peers_sum(const rlk::peers::Sum* sum, void* stream,
                                                                 int device) {
  return rlk::simt::on_device(device, [&] { rlk::peers::launch(*sum, static_cast<hipStream_t>(stream)); });
}
}
