// The few functions of the vendor's C library that its CPU framework calls.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstring>

using errno_t = int;
constexpr errno_t EOK = 0;

inline errno_t memset_s(void *to, size_t room, int value, size_t bytes) {
  if (bytes > room) return 34;
  memset(to, value, bytes);
  return EOK;
}
inline errno_t memcpy_s(void *to, size_t room, const void *from, size_t bytes) {
  if (bytes > room) return 34;
  memcpy(to, from, bytes);
  return EOK;
}
inline errno_t strcpy_s(char *to, size_t room, const char *from) { return memcpy_s(to, room, from, strlen(from) + 1); }

__attribute__((format(printf, 4, 5))) inline int snprintf_s(char *to, size_t room, size_t, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int length = vsnprintf(to, room, format, arguments);
  va_end(arguments);
  return length < static_cast<int>(room) ? length : -1;
}
__attribute__((format(printf, 3, 4))) inline int sprintf_s(char *to, size_t room, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int length = vsnprintf(to, room, format, arguments);
  va_end(arguments);
  return length < static_cast<int>(room) ? length : -1;
}
