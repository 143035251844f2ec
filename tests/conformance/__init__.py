"""Suites of programs from outside: `script/conformance SUITE` runs one and prints a table of what it showed."""
