# Read by CMake right after project(llama_cpp) of the llama-cpp-python sdist.
#
# The sdist turns llama.cpp's "common" library on with set(... CACHE BOOL "" FORCE), so no -D can turn it off. It is a third of
# the compile time, its headers are not installed, and nothing here links it. A normal variable hides the cache entry from
# the if() and option() that read it (policies CMP0126 and CMP0077, both NEW since CMake 3.21, which the sdist asks for).
cmake_policy(SET CMP0126 NEW)
set(LLAMA_BUILD_COMMON OFF)
