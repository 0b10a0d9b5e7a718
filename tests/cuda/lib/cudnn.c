/* DNN is switched off in torch (operators.py): only its version is read. */
unsigned long cudnnGetVersion(void) { return CUDNN_BUILT; }
