// sparse [NAME]: rocSPARSE's products, conversions, triangular solutions and factors of sparse matrices, against the host.
#include "check.h"
#include <algorithm>
#include <rocsparse/rocsparse.h>

#define SPARSE(call) CHECK((call) == rocsparse_status_success)

// A sparse matrix in compressed rows; each row has its diagonal element, which is the largest.
struct Matrix {
    int rows, columns;
    std::vector<int> begin{0}, column;
    std::vector<double> value;
    Matrix(int rows, int columns, unsigned every) : rows(rows), columns(columns) {
        unsigned state = 12345;
        for (int i = 0; i < rows; i++) {
            for (int j = 0; j < columns; j++) {
                state = state * 1664525 + 1013904223;
                if (i != j && (state >> 8) % every != 0) continue;
                column.push_back(j);
                value.push_back(i == j ? 8.0 + i % 5 : (int(state >> 20) - 2047.5) / 4096);
            }
            begin.push_back(int(column.size()));
        }
    }
    int count() const { return int(column.size()); }
    double at(int i, int j) const {
        auto last = column.begin() + begin[i + 1], found = std::lower_bound(column.begin() + begin[i], last, j);
        return found != last && *found == j ? value[found - column.begin()] : 0;
    }
};

struct OnDevice {
    Buffer<int> begin, column;
    Buffer<double> value;
    explicit OnDevice(const Matrix &from) : begin(from.begin), column(from.column), value(from.value) {}
};

struct Room {
    Buffer<char> bytes;
    explicit Room(size_t size) : bytes(std::max<size_t>(size, 4)) {}
};

static std::vector<double> numbers(int n) {
    std::vector<double> made(n);
    for (int i = 0; i < n; i++) made[i] = (i * 37 % 101 - 50) / 16.0;
    return made;
}

static void near(const std::vector<double> &found, const std::vector<double> &expected) {
    CHECK(found.size() == expected.size());
    for (size_t i = 0; i < found.size(); i++)
        CHECK(std::fabs(found[i] - expected[i]) <= 1e-11 * (1 + std::fabs(expected[i])));
}

struct Test {
    rocsparse_handle handle;
    rocsparse_mat_descr general;

    void product(const Matrix &a) const {
        OnDevice m(a);
        std::vector<double> x = numbers(a.columns), y = numbers(a.rows), expected = y;
        for (int i = 0; i < a.rows; i++) {
            expected[i] *= 0.5;
            for (int k = a.begin[i]; k < a.begin[i + 1]; k++) expected[i] += 2 * a.value[k] * x[a.column[k]];
        }
        const double alpha = 2, beta = 0.5;
        for (bool analyzed : {false, true}) {
            rocsparse_mat_info info = nullptr;
            Buffer<double> in(x), out(y);
            if (analyzed) {
                SPARSE(rocsparse_create_mat_info(&info));
                SPARSE(rocsparse_dcsrmv_analysis(handle, rocsparse_operation_none, a.rows, a.columns, a.count(), general,
                                                 m.value, m.begin, m.column, info));
            }
            SPARSE(rocsparse_dcsrmv(handle, rocsparse_operation_none, a.rows, a.columns, a.count(), &alpha, general,
                                    m.value, m.begin, m.column, info, in, &beta, out));
            near(out.read(), expected);
            if (analyzed) SPARSE(rocsparse_destroy_mat_info(info));
        }
        puts("product");
    }

    void transposed(const Matrix &a) const {
        OnDevice m(a);
        Buffer<int> begin(a.columns + 1), row(a.count());
        Buffer<double> value(a.count());
        size_t size;
        SPARSE(rocsparse_csr2csc_buffer_size(handle, a.rows, a.columns, a.count(), m.begin, m.column,
                                             rocsparse_action_numeric, &size));
        Room room(size);
        SPARSE(rocsparse_dcsr2csc(handle, a.rows, a.columns, a.count(), m.value, m.begin, m.column, value, row, begin,
                                  rocsparse_action_numeric, rocsparse_index_base_zero, room.bytes));
        OK(hipDeviceSynchronize());
        std::vector<int> begins = begin.read(), rows = row.read();
        std::vector<double> values = value.read();
        CHECK(begins[a.columns] == a.count());
        for (int j = 0; j < a.columns; j++)
            for (int k = begins[j]; k < begins[j + 1]; k++) {
                CHECK(k == begins[j] || rows[k] > rows[k - 1]);
                CHECK(values[k] == a.at(rows[k], j) && values[k] != 0);
            }
        puts("transposed");
    }

    // L x = y with the lower triangle of a. Rows wait for the rows that they need, in one kernel.
    void solution(const Matrix &a) const {
        OnDevice m(a);
        rocsparse_mat_descr lower;
        rocsparse_mat_info info;
        SPARSE(rocsparse_create_mat_descr(&lower));
        SPARSE(rocsparse_set_mat_fill_mode(lower, rocsparse_fill_mode_lower));
        SPARSE(rocsparse_create_mat_info(&info));
        std::vector<double> y = numbers(a.rows), expected = y;
        for (int i = 0; i < a.rows; i++) {
            for (int k = a.begin[i]; k < a.begin[i + 1] && a.column[k] < i; k++)
                expected[i] -= a.value[k] * expected[a.column[k]];
            expected[i] /= a.at(i, i);
        }
        size_t size;
        SPARSE(rocsparse_dcsrsv_buffer_size(handle, rocsparse_operation_none, a.rows, a.count(), lower, m.value, m.begin,
                                            m.column, info, &size));
        Room room(size);
        SPARSE(rocsparse_dcsrsv_analysis(handle, rocsparse_operation_none, a.rows, a.count(), lower, m.value, m.begin,
                                         m.column, info, rocsparse_analysis_policy_force, rocsparse_solve_policy_auto,
                                         room.bytes));
        const double one = 1;
        Buffer<double> in(y), out(a.rows);
        SPARSE(rocsparse_dcsrsv_solve(handle, rocsparse_operation_none, a.rows, a.count(), &one, lower, m.value, m.begin,
                                      m.column, info, in, out, rocsparse_solve_policy_auto, room.bytes));
        near(out.read(), expected);
        SPARSE(rocsparse_destroy_mat_info(info));
        SPARSE(rocsparse_destroy_mat_descr(lower));
        puts("solution");
    }

    // Incomplete factors L and U of a, in place.
    void factors(const Matrix &a) const {
        OnDevice m(a);
        rocsparse_mat_info info;
        SPARSE(rocsparse_create_mat_info(&info));
        Matrix expected = a;
        for (int i = 0; i < a.rows; i++)
            for (int k = a.begin[i]; k < a.begin[i + 1] && a.column[k] < i; k++) {
                const int pivot = a.column[k];
                const double factor = expected.value[k] /= expected.at(pivot, pivot);
                for (int n = k + 1; n < a.begin[i + 1]; n++)
                    expected.value[n] -= factor * expected.at(pivot, a.column[n]);
            }
        size_t size;
        SPARSE(rocsparse_dcsrilu0_buffer_size(handle, a.rows, a.count(), general, m.value, m.begin, m.column, info, &size));
        Room room(size);
        SPARSE(rocsparse_dcsrilu0_analysis(handle, a.rows, a.count(), general, m.value, m.begin, m.column, info,
                                           rocsparse_analysis_policy_force, rocsparse_solve_policy_auto, room.bytes));
        SPARSE(rocsparse_dcsrilu0(handle, a.rows, a.count(), general, m.value, m.begin, m.column, info,
                                  rocsparse_solve_policy_auto, room.bytes));
        near(m.value.read(), expected.value);
        SPARSE(rocsparse_destroy_mat_info(info));
        puts("factors");
    }
};

int main(int count, char **arguments) {
    auto wanted = [&](const char *name) { return count < 2 || strcmp(arguments[1], name) == 0; };
    Test test;
    SPARSE(rocsparse_create_handle(&test.handle));
    SPARSE(rocsparse_create_mat_descr(&test.general));
    const Matrix wide(301, 257, 9), square(150, 150, 11);
    if (wanted("product")) test.product(wide);
    if (wanted("transposed")) test.transposed(wide);
    if (wanted("solution")) test.solution(square);
    if (wanted("factors")) test.factors(square);
    SPARSE(rocsparse_destroy_mat_descr(test.general));
    SPARSE(rocsparse_destroy_handle(test.handle));
}
