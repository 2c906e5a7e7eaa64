"""The model classes imported when an engine starts; SGLang imports its others when a model needs one.

Named by SGLANG_EXTERNAL_MODEL_PACKAGE; saves a core-second per rank, of 200 model files.
"""
