"""A planned run becomes processes, and processes become a status, behind one seam (`engine`)."""
