// Attention forward and backward from C99 with no header but attention_c.h and the standard ones.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "strobe/kernels/attention_c.h"

// Returns 0, or the number of the step that went wrong.
int strobe_test_attention_from_c(void);

// (1, seq_len, 1, 1): only the step from one position to the next counts.
static strobe_attention_tensor column(float* data) {
  strobe_attention_tensor tensor = {NULL, 0, 1, 0};
  tensor.data = data;
  return tensor;
}

static int close_to(float x, double expected) { return fabs(x - expected) <= 1e-6 * (1 + fabs(expected)); }

// query 0, key 1, value i, causal: out_i = i / 2, lse_i = ln(i + 1); dout 1: dvalue_j = sum of 1 / (i + 1), i >= j.
int strobe_test_attention_from_c(void) {
  enum { seq_len = 7 };
  float query[seq_len], key[seq_len], value[seq_len], out[seq_len], lse[seq_len];
  float dout[seq_len], dquery[seq_len], dkey[seq_len], dvalue[seq_len];
  int i;
  int step = 0;
  char* memory = NULL;
  size_t forward_bytes = 0, backward_bytes = 0;
  strobe_attention_args args;

  for (i = 0; i < seq_len; ++i) {
    query[i] = 0;
    key[i] = 1;
    value[i] = (float)i;
    dout[i] = 1;
  }
  if (strobe_attention_args_init(&args, sizeof args) != STROBE_OK) return 1;
  args.dtype = STROBE_DTYPE_F32;
  args.batch = args.num_heads = args.num_kv_heads = args.head_dim = 1;
  args.seq_len_q = args.seq_len_k = seq_len;
  args.softmax_scale = 1;
  args.causal = 1;
  args.query = column(query);
  args.key = column(key);
  args.value = column(value);
  args.out = column(out);
  args.lse = lse;
  args.dout = column(dout);
  args.dquery = column(dquery);
  args.dkey = column(dkey);
  args.dvalue = column(dvalue);

  if (strobe_attention_forward_workspace(&args, &forward_bytes) != STROBE_OK) return 2;
  if (strobe_attention_backward_workspace(&args, &backward_bytes) != STROBE_OK) return 3;
  args.workspace_bytes = forward_bytes > backward_bytes ? forward_bytes : backward_bytes;
  memory = malloc(args.workspace_bytes + 64);
  if (memory == NULL) return 4;
  args.workspace = memory + (64 - (uintptr_t)memory % 64) % 64;
  if (strobe_attention_forward(&args) != STROBE_OK) step = 5;
  if (step == 0 && strobe_attention_backward(&args) != STROBE_OK) step = 6;
  free(memory);
  if (step != 0) return step;

  for (i = 0; i < seq_len; ++i) {
    double sum = 0;
    int j;
    for (j = i; j < seq_len; ++j) sum += 1.0 / (j + 1);
    if (!close_to(out[i], i / 2.0) || !close_to(lse[i], log(i + 1.0))) return 7;
    if (!close_to(dvalue[i], sum) || !close_to(dquery[i], 0)) return 8;
  }
  return 0;
}
