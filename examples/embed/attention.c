// Attention through the C interface: three queries, three keys and values, causal, small enough to check by hand.
#include "strobe/kernels/attention_c.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { seq_len = 3 };

// (batch 1, seq_len, num_heads 1, head_dim 1): only the stride from one position to the next matters.
static strobe_attention_tensor operand(float* data) {
  strobe_attention_tensor tensor = {data, 0, 1, 0};
  return tensor;
}

static void require(strobe_status status) {
  if (status == STROBE_OK) return;
  fprintf(stderr, "%s\n", strobe_last_error());
  exit(1);
}

// The kernels take all their scratch memory from the caller, aligned to 64 bytes. *block is what to free.
static void* aligned_memory(size_t bytes, void** block) {
  *block = malloc(bytes + 63);
  if (*block == NULL) {
    fprintf(stderr, "no memory for a workspace of %zu bytes\n", bytes);
    exit(1);
  }
  return (void*)(((uintptr_t)*block + 63) & ~(uintptr_t)63);
}

// Prints a result beside what it has to be; 1 when they differ.
static int differs(const char* name, const float* given, const double* expected) {
  int wrong = 0;
  printf("%-7s", name);
  for (int i = 0; i < seq_len; ++i) {
    printf(" %9.4f", given[i]);
    wrong |= !(fabs(given[i] - expected[i]) <= 1e-5 * (1 + fabs(expected[i])));
  }
  printf(wrong ? "   expected %.4f %.4f %.4f\n" : "   as expected\n", expected[0], expected[1], expected[2]);
  return wrong;
}

int main(void) {
  // Scores are i log 2 for key i, so the weights of a query are 1 : 2 : 4 over the keys it sees:
  // P = (1, 0, 0), (1/3, 2/3, 0), (1/7, 2/7, 4/7).
  const double log_2 = log(2.0);
  float query[seq_len] = {(float)log_2, (float)log_2, (float)log_2};
  float key[seq_len] = {0, 1, 2};
  float value[seq_len] = {21, 42, 84};
  float out[seq_len], lse[seq_len];

  printf("strobe %s\n", strobe_version_string());
  strobe_attention_args args;
  require(strobe_attention_args_init(&args, sizeof args));
  args.dtype = STROBE_DTYPE_F32;
  args.batch = args.num_heads = args.num_kv_heads = args.head_dim = 1;
  args.seq_len_q = args.seq_len_k = seq_len;
  args.query = operand(query);
  args.key = operand(key);
  args.value = operand(value);
  args.out = operand(out);
  args.lse = lse;
  args.softmax_scale = 1;
  args.causal = 1;

  void* block;
  require(strobe_attention_forward_workspace(&args, &args.workspace_bytes));
  args.workspace = aligned_memory(args.workspace_bytes, &block);
  require(strobe_attention_forward(&args));
  free(block);

  // The gradient of out[0] + out[1] + out[2]. With dP = (21, 42, 84) in every row, dS = P (dP - out):
  // (0, 0, 0), (-14/3, 14/3, 0), (-6, -6, 12).
  float dout[seq_len] = {1, 1, 1};
  float dquery[seq_len], dkey[seq_len], dvalue[seq_len];
  args.dout = operand(dout);
  args.dquery = operand(dquery);
  args.dkey = operand(dkey);
  args.dvalue = operand(dvalue);
  require(strobe_attention_backward_workspace(&args, &args.workspace_bytes));
  args.workspace = aligned_memory(args.workspace_bytes, &block);
  require(strobe_attention_backward(&args));
  free(block);

  const double expected_out[] = {21, (21 + 2 * 42) / 3.0, (21 + 2 * 42 + 4 * 84) / 7.0};
  const double expected_lse[] = {0, log(1 + 2), log(1 + 2 + 4)};
  const double expected_dquery[] = {0, 14.0 / 3 * 1, -6.0 * 1 + 12.0 * 2};
  const double expected_dkey[] = {(-14.0 / 3 - 6) * log_2, (14.0 / 3 - 6) * log_2, 12 * log_2};
  const double expected_dvalue[] = {1 + 1.0 / 3 + 1.0 / 7, 2.0 / 3 + 2.0 / 7, 4.0 / 7};
  int wrong = differs("out", out, expected_out);
  wrong |= differs("lse", lse, expected_lse);
  wrong |= differs("dquery", dquery, expected_dquery);
  wrong |= differs("dkey", dkey, expected_dkey);
  wrong |= differs("dvalue", dvalue, expected_dvalue);

  // A call that makes no sense is refused, with the field's name.
  args.head_dim = 0;
  if (strobe_attention_forward(&args) == STROBE_OK) wrong = 1;
  printf("refused: %s\n", strobe_last_error());
  return wrong;
}
