"""What nansnoop finds: instructions whose results are NaN, infinite or denormal, and the first such number of each."""
