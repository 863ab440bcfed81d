// Attention on a GPU through the C interface, on CUDA memory and a stream of one's own: the same calls as on the CPU
// but for device_type, stream and the pointers. Both are run, and their results compared.
#include "strobe/kernels/attention_c.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { seq_len = 300, num_heads = 2, head_dim = 64, elements = seq_len * num_heads * head_dim, num_tensors = 8 };

// Places in the list of tensors: inputs, then results.
enum { query, key, value, dout, out, dquery, dkey, dvalue };
static const char* const names[num_tensors] = {"query", "key", "value", "dout", "out", "dquery", "dkey", "dvalue"};

static void require(int ok, const char* why) {
  if (ok) return;
  fprintf(stderr, "%s\n", why);
  exit(1);
}
static void require_cuda(cudaError_t status) { require(status == cudaSuccess, cudaGetErrorString(status)); }
static void require_strobe(strobe_status status) { require(status == STROBE_OK, strobe_last_error()); }

// (batch 1, seq_len, num_heads, head_dim), row-major.
static strobe_attention_tensor operand(float* data) {
  strobe_attention_tensor tensor = {data, elements, num_heads * head_dim, head_dim};
  return tensor;
}

static strobe_attention_args causal_call(float* const tensors[num_tensors], float* lse) {
  strobe_attention_args args;
  require_strobe(strobe_attention_args_init(&args, sizeof args));
  args.dtype = STROBE_DTYPE_F32;
  args.batch = 1, args.num_heads = args.num_kv_heads = num_heads, args.head_dim = head_dim;
  args.seq_len_q = args.seq_len_k = seq_len;
  args.query = operand(tensors[query]), args.key = operand(tensors[key]), args.value = operand(tensors[value]);
  args.out = operand(tensors[out]), args.dout = operand(tensors[dout]);
  args.dquery = operand(tensors[dquery]), args.dkey = operand(tensors[dkey]), args.dvalue = operand(tensors[dvalue]);
  args.lse = lse, args.softmax_scale = 0.125, args.causal = 1;
  return args;
}

// Memory for whichever pass needs more, as both take their scratch memory from the caller.
static size_t workspace_bytes(const strobe_attention_args* args) {
  size_t forward, backward;
  require_strobe(strobe_attention_forward_workspace(args, &forward));
  require_strobe(strobe_attention_backward_workspace(args, &backward));
  return forward > backward ? forward : backward;
}

int main(void) {
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) {
    puts("no GPU");
    return 0;
  }

  float* host[num_tensors];
  float* device[num_tensors];
  cudaStream_t stream;
  require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (int t = 0; t < num_tensors; ++t) {
    host[t] = malloc(elements * sizeof(float));
    require(host[t] != NULL, "no memory");
    for (int i = 0; i < elements; ++i) host[t][i] = (float)rand() / (float)RAND_MAX - 0.5f;
    require_cuda(cudaMalloc((void**)&device[t], elements * sizeof(float)));
    require_cuda(cudaMemcpyAsync(device[t], host[t], elements * sizeof(float), cudaMemcpyHostToDevice, stream));
  }
  static float host_lse[num_heads * seq_len];
  float* device_lse;
  require_cuda(cudaMalloc((void**)&device_lse, sizeof host_lse));

  // All is queued on the stream: the copies above, the kernels, the copies below.
  strobe_attention_args args = causal_call(device, device_lse);
  args.device_type = STROBE_DEVICE_CUDA, args.stream = stream;
  args.workspace_bytes = workspace_bytes(&args);
  require_cuda(cudaMalloc(&args.workspace, args.workspace_bytes));
  require_strobe(strobe_attention_forward(&args));
  require_strobe(strobe_attention_backward(&args));
  float* result = malloc(elements * sizeof(float));
  require(result != NULL, "no memory");

  strobe_attention_args cpu_args = causal_call(host, host_lse);
  cpu_args.workspace_bytes = workspace_bytes(&cpu_args);
  char* const block = malloc(cpu_args.workspace_bytes + 63);
  require(block != NULL, "no memory");
  cpu_args.workspace = (void*)(((uintptr_t)block + 63) & ~(uintptr_t)63);
  require_strobe(strobe_attention_forward(&cpu_args));
  require_strobe(strobe_attention_backward(&cpu_args));

  int wrong = 0;
  for (int t = out; t <= dvalue; ++t) {
    require_cuda(cudaMemcpyAsync(result, device[t], elements * sizeof(float), cudaMemcpyDeviceToHost, stream));
    require_cuda(cudaStreamSynchronize(stream));
    double error = 0, largest = 0;
    for (int i = 0; i < elements; ++i) {
      error = fmax(error, fabs((double)result[i] - host[t][i]));
      largest = fmax(largest, fabs(host[t][i]));
    }
    wrong |= !(error <= 1e-5 * largest);
    printf("%-7s differs from the CPU's by at most %.1e of its largest element\n", names[t], error / largest);
  }

  // A pointer that the GPU cannot read is refused before anything is queued.
  args.query.data = host[query];
  wrong |= strobe_attention_forward(&args) == STROBE_OK;
  printf("refused: %s\n", strobe_last_error());

  for (int t = 0; t < num_tensors; ++t) {
    free(host[t]);
    require_cuda(cudaFree(device[t]));
  }
  free(block);
  free(result);
  require_cuda(cudaFree(args.workspace));
  require_cuda(cudaFree(device_lse));
  require_cuda(cudaStreamDestroy(stream));
  return wrong;
}
