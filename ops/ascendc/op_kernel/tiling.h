// How a tensor is cut into tiles, and how tiles are shared out to cores: for the host, which chooses the number of
// cores, and for the kernels. No header of the vendor's.
#pragma once

#include <cstdint>

#ifndef MS_OPTIM_DEVICE
#define MS_OPTIM_DEVICE
#endif

namespace ms_optim {

// Elements that are copied to a core at a time. What is summed up over a tensor is summed up tile by tile, so that the
// number of cores does not matter to any bit.
constexpr uint32_t kTile = 2048;
// Float32 numbers in 32 bytes, which addresses in a core's memory are aligned to; a tile leaves so many of each sum.
constexpr uint32_t kLanes = 8;

// What a launch tells its cores.
struct Tiling {
  int64_t size;  // elements of the tensor
};

struct TileRange {
  int64_t begin, end;
};

MS_OPTIM_DEVICE inline int64_t TilesOf(int64_t size) { return (size + kTile - 1) / kTile; }

// The tiles of one core: no two cores' numbers of tiles differ by more than 1.
MS_OPTIM_DEVICE inline TileRange ShareOf(int64_t tiles, int64_t core, int64_t cores) {
  return {tiles * core / cores, tiles * (core + 1) / cores};
}

// How many of the cores that are there have something to do; a launch has one at least.
MS_OPTIM_DEVICE inline uint32_t CoresFor(int64_t tiles, uint32_t there) {
  const uint32_t cores = tiles < there ? static_cast<uint32_t>(tiles) : there;
  return cores < 1 ? 1 : cores;
}

}  // namespace ms_optim
