"""The parts that the sentences about verdicts consist of: values, headlines, and what to run next."""
