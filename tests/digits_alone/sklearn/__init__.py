"""A stand-in for scikit-learn in jobs that take the digits from it, and nothing else.

Importing scikit-learn takes longer than importing torch. The digits are its own: the file of the
installed package is read.
"""
