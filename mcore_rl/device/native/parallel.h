/* Loops on several threads. A file that is compiled without OpenMP runs them on one.

   A matrix product within such a loop runs on the thread that calls it. */

#include <stdint.h>

#ifdef _OPENMP
#include <omp.h>
static inline int64_t thread_number(void) { return omp_get_thread_num(); }
#else
static inline int64_t thread_number(void) { return 0; }
#endif

#define GRAIN 16384 /* floats of work, for fewer of which other threads are not woken */
