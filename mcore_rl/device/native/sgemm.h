/* The matrix product of a BLAS library, as Fortran has it. */
typedef void sgemm_t(const char *, const char *, const int *, const int *, const int *,
                     const float *, const float *, const int *, const float *, const int *,
                     const float *, float *, const int *);
