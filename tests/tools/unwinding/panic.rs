// panic LIBRARY: calls each function of a library; each panics in a callback, and the panic is caught around the call.
use std::ffi::{c_char, c_int, c_void, CString};

extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

type Function = extern "C-unwind" fn(i64, i64, i64, i64, i64, i64) -> i64;

extern "C-unwind" fn act(_which: c_int) {
    panic!("in a callback")
}

fn main() {
    let path = CString::new(std::env::args().nth(1).unwrap()).unwrap();
    std::panic::set_hook(Box::new(|_| {}));
    unsafe {
        let library = dlopen(path.as_ptr(), 2);
        let count = *(dlsym(library, c"count".as_ptr()) as *const c_int);
        let functions = dlsym(library, c"functions".as_ptr()) as *const Function;
        *(dlsym(library, c"act".as_ptr()) as *mut extern "C-unwind" fn(c_int)) = act;
        let caught = (0..count as usize)
            .filter(|i| std::panic::catch_unwind(|| (*functions.add(*i))(0, 0, 0, 0, 0, 0)).is_err())
            .count();
        println!("panic: {} of {}", caught, count);
    }
}
