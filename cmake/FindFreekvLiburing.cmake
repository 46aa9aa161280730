# liburing, where it is installed and FREEKV_WITH_LIBURING is not OFF: a store file is then read through io_uring.
#
# Defines the imported target freekv::liburing, which is empty without it.
if(NOT DEFINED FREEKV_WITH_LIBURING OR FREEKV_WITH_LIBURING)
  find_path(FREEKV_LIBURING_INCLUDE liburing.h)
  find_library(FREEKV_LIBURING_LIBRARY uring)
  mark_as_advanced(FREEKV_LIBURING_INCLUDE FREEKV_LIBURING_LIBRARY)
endif()
if(NOT TARGET freekv::liburing)
  add_library(freekv::liburing INTERFACE IMPORTED)
  if((NOT DEFINED FREEKV_WITH_LIBURING OR FREEKV_WITH_LIBURING) AND FREEKV_LIBURING_INCLUDE AND FREEKV_LIBURING_LIBRARY)
    set_target_properties(freekv::liburing PROPERTIES
      INTERFACE_INCLUDE_DIRECTORIES "${FREEKV_LIBURING_INCLUDE}"
      INTERFACE_LINK_LIBRARIES "${FREEKV_LIBURING_LIBRARY}"
      INTERFACE_COMPILE_DEFINITIONS FREEKV_WITH_LIBURING=1)
  endif()
endif()
set(FreekvLiburing_FOUND TRUE)
