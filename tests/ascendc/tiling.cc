// Whether the shares of all cores are all tiles, each once and in order, and the tiles all elements.
#include "tiling.h"

#include <cstdio>
#include <initializer_list>

namespace {

bool IsRight(int64_t size, uint32_t there) {
  using namespace ms_optim;
  const int64_t tiles = TilesOf(size);
  const uint32_t cores = CoresFor(tiles, there);
  if (cores < 1 || cores > there || (tiles > 0 && cores > tiles)) return false;
  if (tiles * kTile < size || (tiles > 0 && (tiles - 1) * kTile >= size)) return false;
  int64_t next = 0, least = tiles, most = 0;
  for (uint32_t core = 0; core < cores; ++core) {
    const TileRange share = ShareOf(tiles, core, cores);
    if (share.begin != next || share.end < share.begin) return false;
    next = share.end;
    const int64_t count = share.end - share.begin;
    least = count < least ? count : least;
    most = count > most ? count : most;
  }
  return next == tiles && most - least <= 1;
}

}  // namespace

int main() {
  for (uint32_t there = 1; there <= 50; ++there) {
    for (int64_t size = 0; size <= 130000; size += size % 2048 < 2 || size % 2048 > 2045 ? 1 : 61) {
      for (const int64_t s : {size, (int64_t{1} << 31) + size, (int64_t{1} << 40) - size}) {
        if (IsRight(s, there)) continue;
        fprintf(stderr, "%lld elements on %u cores are shared out wrongly\n", static_cast<long long>(s), there);
        return 1;
      }
    }
  }
  return 0;
}
