"""Options: dataclasses that refuse bad values when they are built and when they are changed.

Nothing is imported here and nothing here imports torch, so that the notebook half can use these objects in
a kernel that has not loaded torch. Import them from their own files, or from `nb_accelerate`.
"""
