// What moments.cu shares with early.cpp.
#pragma once

int named(
    const char
        *word);  // the number behind the colon of a "word:number" of the command line; 0: it is not there
void forget_words();  // in a forked child: they are the parent's moments
void launch_and_check(int launches);
