/* cuBLAS and cuDNN: the functions that hand something out. `build.py` writes the rest. */
#include "card.h"

#include <string.h>

int cublasCreate_v2(void **handle) { return *handle = new_handle(), 0; }
int cublasGetMathMode(void *handle, int *mode) { return *mode = 0, 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0, 0; }
int cublasLtMatmulDescCreate(void **made, int compute, int scale) { return *made = new_handle(), 0; }
int cublasLtMatmulPreferenceCreate(void **made) { return *made = new_handle(), 0; }
int cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    return *made = new_handle(), 0;
}
size_t cublasLtGetVersion(void) { return 130000; }

struct matmul_heuristic {
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, struct matmul_heuristic *found, int *count) {
    memset(found, 0, sizeof *found);
    return *count = 1, 0;
}

/* cuDNN describes what it can do in descriptors, which torch's front end asks for their attributes one by one. */
enum attribute {
    HEURISTIC_RESULTS = 202,
    HEURISTIC_MODE = 201,
    PLAN_WORKSPACE = 402,
    ENGINE_NOTES_FIRST = 1303,
    ENGINE_NOTES_LAST = 1306,
};
enum attribute_type { HANDLE = 0, DATA_TYPE = 1, BOOLEAN = 2, INT64 = 3, DESCRIPTOR = 15 };

int cudnnBackendCreateDescriptor(int type, void **made) { return *made = new_handle(), 0; }

int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t room, int64_t *count, void *values) {
    int64_t ignored, *found = count ? count : &ignored;
    *found = name >= ENGINE_NOTES_FIRST && name <= ENGINE_NOTES_LAST ? 0 : 1;
    if (name == HEURISTIC_RESULTS || name == HEURISTIC_MODE || type == DESCRIPTOR || !*found || !values || !room) return 0;
    if (name == PLAN_WORKSPACE) *(int64_t *)values = setting("MEMOPT_CARD_CUDNN_WORKSPACE", 0);
    else if (type == INT64) *(int64_t *)values = 0;
    else if (type == BOOLEAN) *(char *)values = 0;
    else *(int *)values = 0;
    return 0;
}

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int operations, void *x, void *z,
                                                             void *y, void *norm, void *activation, size_t *bytes) {
    return *bytes = 0, 0;
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int operations, void *x, void *y, void *dy,
                                                      void *dz, void *dx, void *norm, void *activation, size_t *bytes) {
    return *bytes = 0, 0;
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int operations, void *activation,
                                                         void *x, size_t *bytes) {
    return *bytes = 0, 0;
}
int cudnnDropoutGetStatesSize(void *handle, size_t *bytes) { return *bytes = 0, 0; }
int cudnnGetRNNWeightSpaceSize(void *handle, void *layer, size_t *bytes) { return *bytes = 0, 0; }
int cudnnGetRNNTempSpaceSizes(void *handle, void *layer, int mode, void *x, size_t *workspace, size_t *reserve) {
    return *workspace = *reserve = 0, 0;
}
