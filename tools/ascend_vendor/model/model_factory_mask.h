// In place of the vendor's header of this name: what the masks of vectors are, as its checks of arguments ask.
#pragma once

#include <cstdint>

uint64_t ModelFactoryGetMaskHigh();
uint64_t ModelFactoryGetMaskLow();
// Whether a mask counts elements (1) or has a bit for each (0).
int ModelFactoryGetMaskMode();
