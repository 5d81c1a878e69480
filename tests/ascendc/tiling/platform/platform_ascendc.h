// A stand-in for the header of this name: how many cores there are. See ../../stand_in.h.
#pragma once

#include "register/op_def_registry.h"

namespace platform_ascendc {

class PlatformAscendC {
 public:
  explicit PlatformAscendC(gert::PlatformInfo *info) : cores_(info->cores) {}
  uint32_t GetCoreNumAiv() const { return cores_; }

 private:
  uint32_t cores_;
};

}  // namespace platform_ascendc
