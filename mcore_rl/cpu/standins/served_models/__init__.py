"""The model classes that an engine imports at its start, named by SGLANG_EXTERNAL_MODEL_PACKAGE.

sglang_on_cpu/models.py imports the others when a model needs one. SGLang alone would import all 200
model files, a core-second per rank.
"""
