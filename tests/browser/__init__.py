"""Tests in JupyterLab and Notebook 7. A package, so that its fixtures of that scope end with its last test."""
