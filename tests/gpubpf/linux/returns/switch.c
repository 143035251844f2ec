/* A switch with a table, whose cases return, and a function that the other one does not reach. */
int sink(int);

int chooses(int n)
{
    switch (n) {
    case 0: return sink(3) + 1;
    case 1: return sink(1) * 5;
    case 2: return sink(4) - 7;
    case 3: return sink(1) ^ 9;
    case 4: return sink(5) / 3;
    case 5: return sink(9) | 1;
    case 6: return sink(2) & 6;
    default: return n;
    }
}

int after(int n)
{
    return sink(n) + 1;
}
