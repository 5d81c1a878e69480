// The tiles of a tensor, and the share of each core: for the host, which chooses the number of cores, and for the
// kernels. It includes no header of the vendor.
#pragma once

#include <cstdint>

#ifndef MS_OPTIM_DEVICE
#define MS_OPTIM_DEVICE
#endif

namespace ms_optim {

// Elements that are copied to a core at a time. Sums over a tensor are added up tile by tile, so that no bit depends on
// the number of cores.
constexpr uint32_t kTile = 2048;
// Float32 numbers in 32 bytes, to which a core's memory is aligned; a tile leaves so many partial sums of each kind.
constexpr uint32_t kLanes = 8;

// The arguments of a launch for its cores.
struct Tiling {
  int64_t size;  // elements of the tensor
};

struct TileRange {
  int64_t begin, end;
};

MS_OPTIM_DEVICE inline int64_t TilesOf(int64_t size) { return (size + kTile - 1) / kTile; }

// Returns the tiles of one core; the numbers of two cores differ by at most 1.
MS_OPTIM_DEVICE inline TileRange ShareOf(int64_t tiles, int64_t core, int64_t cores) {
  return {tiles * core / cores, tiles * (core + 1) / cores};
}

// Returns how many of the available cores a launch takes: no more than there are tiles, and at least one.
MS_OPTIM_DEVICE inline uint32_t CoresFor(int64_t tiles, uint32_t there) {
  const uint32_t cores = tiles < there ? static_cast<uint32_t>(tiles) : there;
  return cores < 1 ? 1 : cores;
}

}  // namespace ms_optim
