# Finds oneDNN by its header and library, and gives DNNL::dnnl. Its own package file demands OpenCL's headers where
# oneDNN was built with GPU support, which nothing here uses.
include_guard(GLOBAL)

find_path(RLK_DNNL_INCLUDE dnnl.hpp)
find_library(RLK_DNNL_LIBRARY dnnl)
mark_as_advanced(RLK_DNNL_INCLUDE RLK_DNNL_LIBRARY)
set(RLK_DNNL_FOUND FALSE)
if(RLK_DNNL_INCLUDE AND RLK_DNNL_LIBRARY)
  set(RLK_DNNL_FOUND TRUE)
  if(NOT TARGET DNNL::dnnl)
    add_library(DNNL::dnnl UNKNOWN IMPORTED GLOBAL)
    set_target_properties(DNNL::dnnl PROPERTIES
      IMPORTED_LOCATION ${RLK_DNNL_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${RLK_DNNL_INCLUDE})
  endif()
endif()
