"""Benchmarks: what harmony_lab reaches, measured, as rows of JSON."""
